"""Sums over the rows of a matrix, one per column, in a fixed order: two launches, no atomics.

torch adds up the columns of a tall, narrow matrix at a tenth of the memory's speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..maps.coord_key import live_rows
from ..runtime.launch import alignment, cdiv, register, specialise
from ..runtime.target import Target
from .batch_norm import span, unread

TILE = 8192  # values of a step
PARTS = 512  # at most, of the rows
PROGRAMS = 4  # of a compute unit
WIDTHS = (16, 64)  # columns of a program
OPTIONS = {"num_warps": 8}


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted"])
def _column_partials(
    x_ptr, count_ptr, partial_ptr, n_rows, n_channels, counted, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """grid: (parts of the rows, blocks of the columns). partial: [parts, C]."""
    lane = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    begin, end = span(live_rows(count_ptr, n_rows, counted), ROWS)
    shift = begin.to(tl.int64) * n_channels
    offs = lane[:, None] * n_channels + channel[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(begin, end, ROWS):
        ok = (start + lane < end)[:, None] & ok_c[None, :]
        total += tl.load(x_ptr + shift + offs, mask=ok, other=0.0).to(tl.float32)
        shift += ROWS * n_channels
    out_ptr = partial_ptr + tl.program_id(0) * n_channels + channel
    tl.store(out_ptr, tl.sum(total, 0), mask=ok_c)


@triton.jit(do_not_specialize=["n_parts"])
def _column_totals(partial_ptr, y_ptr, n_parts, n_channels, PARTS: tl.constexpr, CHANNELS: tl.constexpr):
    """grid: (blocks of the columns,). y [C] from partial [n_parts, C]."""
    part = tl.arange(0, PARTS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    ok = (part < n_parts)[:, None] & ok_c[None, :]
    offs = part[:, None] * n_channels + channel[None, :]
    total = tl.sum(tl.load(partial_ptr + offs, mask=ok, other=0.0), 0)
    tl.store(y_ptr + channel, total.to(y_ptr.dtype.element_ty), mask=ok_c)


partials_kernel = register(_column_partials)
totals_kernel = register(_column_totals)


def column_sum(x: torch.Tensor, y: torch.Tensor, target: Target, count: torch.Tensor | None = None) -> torch.Tensor:
    """Write y [C] (fp16, bf16 or fp32) from x [N, C], contiguous (likewise); N and C at least 1.
    Sums are fp32. count: int32 [1], one less than the rows that there are; None: all are."""
    n_rows, n_channels = x.shape
    width = WIDTHS[0] if n_channels <= WIDTHS[0] else WIDTHS[1]
    rows, blocks = TILE // width, cdiv(n_channels, width)
    parts = max(1, min(cdiv(n_rows, rows), PROGRAMS * target.compute_units // blocks, PARTS))
    partial = torch.empty((parts, n_channels), dtype=torch.float32, device=x.device)
    columns = specialise(n_channels)
    partials_kernel.launch(
        x.device,
        target,
        (parts, blocks, 1),
        (x, unread(x.device) if count is None else count, partial, n_rows, n_channels, int(count is not None)),
        (rows, width),
        OPTIONS,
        (width, x.dtype, alignment(x), columns),
    )
    totals_kernel.launch(
        x.device,
        target,
        (cdiv(n_channels, WIDTHS[0]), 1, 1),
        (partial, y, parts, n_channels),
        (PARTS, WIDTHS[0]),
        OPTIONS,
        (y.dtype, alignment(y), columns),
    )
    return y
