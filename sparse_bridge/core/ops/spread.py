"""Copying few rows to many, the adjoint of pooling whole batch items."""

from __future__ import annotations

import torch

from ..maps.rows import rows_of
from ..maps.segments import SegmentOperator, Segments, multiply


def items_in_use(batch: torch.Tensor) -> torch.Tensor:
    """Batch indices, integers [N]; -1, which is no item, in rows that are not in use."""
    rows = rows_of(batch)
    if rows.device is None:
        return batch
    return torch.where(torch.arange(len(batch), device=batch.device) <= rows.device, batch, -1)


def spread(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [B, C], any float dtype, rows int64 [N] -> x[rows] [N, C] in that dtype; the gradient sums each item without
    atomics. Raises: UnsupportedError in transforms of torch.func."""
    y, used = multiply(x, spread_operator(items_in_use(rows), x.shape[0])), rows_of(rows)
    return used.fill_padding(y.clone()) if used.padding_value else y


def spread_operator(rows: torch.Tensor, n_rows: int) -> SegmentOperator:
    """`spread` of n_rows rows as an operator: [n_rows, C] -> [N, C]. rows: int64 [N]."""
    return SegmentOperator(Segments(rows, n_rows), gathers=True)
