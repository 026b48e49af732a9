"""Copying few rows to many, the adjoint of pooling whole batch items."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .pool import global_pool

__all__ = ["spread"]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.n_rows = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        if ctx.n_rows == 0:
            return dy.new_zeros((0, dy.shape[1])), None
        return global_pool(dy.contiguous(), rows, ctx.n_rows, "sum"), None


def spread(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [B, C], rows int64 [N] -> x[rows] [N, C]; the gradient sums each item without atomics."""
    return _Spread.apply(x, rows)
