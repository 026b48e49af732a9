"""Copying few rows to many, the adjoint of pooling whole batch items."""

from __future__ import annotations

import torch

from ..maps.segments import SegmentOperator, Segments, multiply


def spread(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [B, C], rows int64 [N] -> x[rows] [N, C]; the gradient sums each item without atomics."""
    return multiply(x, SegmentOperator(Segments(rows, x.shape[0]), gathers=True))
