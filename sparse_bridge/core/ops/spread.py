"""Copying few rows to many, the adjoint of pooling whole batch items."""

from __future__ import annotations

import torch

from ..maps.segments import SegmentOperator, Segments, multiply


def spread(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [B, C], any float dtype, rows int64 [N] -> x[rows] [N, C] in that dtype; the gradient sums each item without
    atomics. Raises: UnsupportedError in transforms of torch.func."""
    return multiply(x, spread_operator(rows, x.shape[0]))


def spread_operator(rows: torch.Tensor, n_rows: int) -> SegmentOperator:
    """`spread` of n_rows rows as an operator: [n_rows, C] -> [N, C]. rows: int64 [N]."""
    return SegmentOperator(Segments(rows, n_rows), gathers=True)
