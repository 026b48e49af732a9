"""Bounds of coordinates: the lowest and the highest of every column over the rows in use, however many these are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import power_of_2, register
from ..runtime.parts import Operand
from ..runtime.target import Target

FAR = (1 << 31) - 1
_ROWS = 2048
OPTIONS = {"num_warps": 8}


@triton.jit(do_not_specialize=["last_ptr", "n_rows", "items", "least", "far"])
def _row_bounds(
    coords_ptr,
    last_ptr,
    bounds_ptr,
    n_rows,
    items,
    least,
    far,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program. coords: int32 [n_rows, COLUMNS]; last: int32 [1], of the rows in use; bounds: int32 [2, COLUMNS],
    lowest and highest. Rows outside of 0 <= batch < items, least <= axis < far, do not count."""
    rows = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, LANES)[None, :]
    n_used = tl.minimum(tl.load(last_ptr) + 1, n_rows)
    first, end = tl.where(column == 0, 0, least), tl.where(column == 0, items, far)
    low = tl.full((LANES,), 2147483647, tl.int32)
    high = tl.full((LANES,), -2147483648, tl.int32)
    for begin in range(0, n_used, ROWS):
        ok = (begin + rows < n_used) & (column < COLUMNS)
        value = tl.load(coords_ptr + (begin + rows).to(tl.int64) * COLUMNS + column, mask=ok, other=0)
        near = (value >= first) & (value < end) | (column >= COLUMNS)
        counts = ok & (tl.min(near.to(tl.int32), 1)[:, None] != 0)
        low = tl.minimum(low, tl.min(tl.where(counts, value, 2147483647), 0))
        high = tl.maximum(high, tl.max(tl.where(counts, value, -2147483648), 0))
    lane = tl.arange(0, LANES)
    tl.store(bounds_ptr + lane, low, mask=lane < COLUMNS)
    tl.store(bounds_ptr + COLUMNS + lane, high, mask=lane < COLUMNS)


row_bounds_kernel = register(_row_bounds)


def row_bounds(
    coords: torch.Tensor, last: Operand, target: Target, items: int = FAR, far: int = FAR, least: int | None = None
) -> torch.Tensor:
    """int32 [2, 1 + D]: the lowest and the highest value of every column; the highest is below the lowest where no
    row counts.

    coords: int32 [N, 1 + D], contiguous.  last: int32 [1] on the device, the number of the last row in use.
    Rows count whose batch item is from 0 to below `items`, and whose axes are from `least`, -far if it is not given, to
    below far.
    """
    n_rows, columns = coords.shape
    bounds = torch.empty((2, columns), dtype=torch.int32, device=coords.device)
    constants = columns, power_of_2(columns), _ROWS
    row_bounds_kernel.launch(
        coords.device,
        target,
        (1, 1, 1),
        (coords, last, bounds, n_rows, items, -far if least is None else least, far),
        constants,
        OPTIONS,
        (constants, coords.data_ptr() % 16, bounds.data_ptr() % 16),
    )
    return bounds
