"""Rows written into a dense grid, where only the device knows how many there are: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..maps.coord_key import live_rows
from ..runtime.launch import alignment, cdiv, power_of_2, register
from ..runtime.parts import Operand
from ..runtime.target import Target

_ROWS = 32
_MOST_CHANNELS = 64  # of a program
OPTIONS = {"num_warps": 4}


@triton.jit(do_not_specialize=["n_rows", "n_channels"])
def _dense_rows(
    x_ptr,
    coords_ptr,
    sizes_ptr,
    count_ptr,
    y_ptr,
    n_rows,
    n_channels,
    AXES: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """grid: (blocks of rows, blocks of channels). x [N, C], coords int32 [N, 1 + AXES], sizes int32
    [1 + AXES]; y [B, C, *sizes] where FIRST, else [B, *sizes, C]. Rows outside of the grid are left out."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok = row < live_rows(count_ptr, n_rows, 1)
    item = tl.load(coords_ptr + row.to(tl.int64) * (1 + AXES), mask=ok, other=0)
    ok &= (item >= 0) & (item < tl.load(sizes_ptr))
    cell = tl.zeros((ROWS,), tl.int64)
    cells = tl.full((), 1, tl.int64)
    for axis in tl.static_range(1, 1 + AXES):
        size = tl.load(sizes_ptr + axis)
        at = tl.load(coords_ptr + row.to(tl.int64) * (1 + AXES) + axis, mask=ok, other=0)
        ok &= (at >= 0) & (at < size)
        cell = cell * size + at
        cells *= size
    both = ok[:, None] & (channel < n_channels)[None, :]
    value = tl.load(x_ptr + row.to(tl.int64)[:, None] * n_channels + channel[None, :], mask=both, other=0.0)
    if FIRST:
        start = item.to(tl.int64) * n_channels
        offs = (start[:, None] + channel[None, :]) * cells + cell[:, None]
    else:
        offs = (item * cells + cell)[:, None] * n_channels + channel[None, :]
    tl.store(y_ptr + offs, value, mask=both)


dense_rows_kernel = register(_dense_rows)


def dense_rows(
    x: torch.Tensor,
    coords: torch.Tensor,
    sizes: torch.Tensor,
    count: Operand,
    y: torch.Tensor,
    first: bool,
    target: Target,
) -> torch.Tensor:
    """Write rows of x [N, C] (contiguous, any float) into y (contiguous, likewise), at coords int32 [N, 1 + D].

    sizes: int32 [1 + D], of y without channels.  count: int32 [1], the rows in use less one; coordinates
    that lie in the grid are distinct there.  first: channels come behind the batch in y, else last.
    """
    n_rows, n_channels = x.shape
    channels = min(_MOST_CHANNELS, max(16, power_of_2(n_channels)))
    constants = (coords.shape[1] - 1, first, _ROWS, channels)
    dense_rows_kernel.launch(
        x.device,
        target,
        (cdiv(n_rows, _ROWS), cdiv(n_channels, channels), 1),
        (x, coords, sizes, count, y, n_rows, n_channels),
        constants,
        OPTIONS,
        (constants, x.dtype, alignment(x, coords, sizes, y), count.data_ptr() % 16 == 0),
    )
    return y
