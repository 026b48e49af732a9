"""Pooling over a neighbour table, and over whole batch items; no atomics anywhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, power_of_2, register, specialise
from ..runtime.target import Target

MODES = {"sum": 0, "avg": 1, "max": 2}
_ROWS = 32


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_channels"])
def _pool_forward(
    x_ptr,
    nbr_ptr,
    y_ptr,
    count_ptr,
    n_rows,
    n_offsets,
    n_channels,
    floor,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y[r, c] over the present x[nbr[v, r], c]: sum, mean, or max(floor, ...); count [n_rows] int32
    for the mean."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    if MODE == 2:
        acc += floor
    count = tl.zeros((ROWS,), tl.int32)
    for v in range(n_offsets):
        source = tl.load(nbr_ptr + v * n_rows.to(tl.int64) + row, mask=row < n_rows, other=-1)
        present = source >= 0
        ok = present[:, None] & ok_c[None, :]
        value = tl.load(x_ptr + source.to(tl.int64)[:, None] * n_channels + channel[None, :], mask=ok, other=0.0)
        value = value.to(tl.float32)
        if MODE == 2:
            # A NaN input wins, as in dense max pooling.
            acc = tl.where(ok & ((value > acc) | (value != value)), value, acc)
        else:
            acc += value
            count += present.to(tl.int32)
    if MODE == 1:
        acc = acc / tl.maximum(count, 1).to(tl.float32)[:, None]
        if tl.program_id(1) == 0:
            tl.store(count_ptr + row, count, mask=row < n_rows)
    out = y_ptr + row.to(tl.int64)[:, None] * n_channels + channel[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(row < n_rows)[:, None] & ok_c[None, :])


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_channels"])
def _pool_backward(
    x_ptr,
    y_ptr,
    dy_ptr,
    nbr_ptr,
    count_ptr,
    dx_ptr,
    n_rows,
    n_offsets,
    n_channels,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """dx[r, c] over the transposed table: every input that equals a window's maximum takes that
    window's gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    inside = (row < n_rows)[:, None] & ok_c[None, :]
    offs_x = row.to(tl.int64)[:, None] * n_channels + channel[None, :]
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    if MODE == 2:
        x = tl.load(x_ptr + offs_x, mask=inside, other=0.0).to(tl.float32)
    for v in range(n_offsets):
        window = tl.load(nbr_ptr + v * n_rows.to(tl.int64) + row, mask=row < n_rows, other=-1)
        ok = (window >= 0)[:, None] & ok_c[None, :]
        offs_y = window.to(tl.int64)[:, None] * n_channels + channel[None, :]
        gradient = tl.load(dy_ptr + offs_y, mask=ok, other=0.0).to(tl.float32)
        if MODE == 2:
            y = tl.load(y_ptr + offs_y, mask=ok, other=0.0).to(tl.float32)
            gradient = tl.where(ok & (x == y), gradient, 0.0)
        if MODE == 1:
            count = tl.load(count_ptr + window, mask=window >= 0, other=1)
            gradient = gradient / count.to(tl.float32)[:, None]
        acc += gradient
    tl.store(dx_ptr + offs_x, acc.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_channels", "n_segments"])
def _first_largest(
    x_ptr,
    order_ptr,
    starts_ptr,
    index_ptr,
    n_channels,
    n_segments,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Of share program_id(2) of segment program_id(0), rows order[starts[s] : starts[s + 1]]: index
    [SHARES, S, C] int64, the first row that holds the maximum (a NaN is larger than any number), -1
    if none."""
    segment = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    begin = tl.load(starts_ptr + segment)
    end = tl.load(starts_ptr + segment + 1)
    length = tl.cdiv(end - begin, SHARES)
    begin += tl.program_id(2) * length
    end = tl.minimum(end, begin + length)
    best = tl.zeros((ROWS, CHANNELS), tl.float32)
    index = tl.zeros((ROWS, CHANNELS), tl.int64) - 1
    # Triton 3.8 and 3.9 for AMD take a loop between 64-bit bounds for empty, and fold comparisons
    # of the integers that it carries.
    for step in range(tl.cdiv(end - begin, ROWS).to(tl.int32)):
        offs = begin + step * ROWS + tl.arange(0, ROWS)
        row = tl.load(order_ptr + offs, mask=offs < end, other=-1).to(tl.int64)
        ok = (offs < end)[:, None] & ok_c[None, :]
        value = tl.load(x_ptr + row[:, None] * n_channels + channel[None, :], mask=ok, other=0.0).to(tl.float32)
        better = ok & ((index < 0) | (value > best) | ((value != value) & (best == best)))
        index = tl.where(better, row[:, None], index)
        best = tl.where(better, value, best)
    out = (tl.program_id(2) * n_segments + segment).to(tl.int64) * n_channels + channel
    present = index >= 0
    top = tl.max(tl.where(present & (best == best), best, -float("inf")), 0)
    rows = tl.where(present & (best == top[None, :]), index, 9223372036854775807)
    first = tl.min(rows, 0)
    rows = tl.where(present & (best != best), index, 9223372036854775807)
    first_nan = tl.min(rows, 0)
    first = tl.where(first_nan == 9223372036854775807, first, first_nan)
    tl.store(index_ptr + out, tl.where(first == 9223372036854775807, -1, first), mask=ok_c)


pool_forward_kernel = register(_pool_forward)
pool_backward_kernel = register(_pool_backward)
first_largest_kernel = register(_first_largest)


def _channels(n_channels: int) -> int:
    return min(128, max(16, power_of_2(n_channels)))


def pool_forward(
    x: torch.Tensor, nbr: torch.Tensor, y: torch.Tensor, count: torch.Tensor, mode: str, floor: float, target: Target
) -> None:
    """Write y [N_out, C], like x, and for "avg" count int32 [N_out], the inputs of each window.

    x: [N_in, C] contiguous, fp16 / bf16 / fp32.  nbr: int32 [V, N_out].  mode: "max" (`floor` at least), "avg" or
    "sum"; KeyError for any other. Sums run in fp32.
    """
    (n_offsets, n_rows), n_channels = nbr.shape, x.shape[1]
    constants = (MODES[mode], _ROWS, _channels(n_channels))
    pool_forward_kernel.launch(
        x.device,
        target,
        (cdiv(n_rows, _ROWS), cdiv(n_channels, constants[2]), 1),
        (x, nbr, y, count, n_rows, n_offsets, n_channels, float(floor)),
        constants,
        {"num_warps": 4},
        (constants, x.dtype, x.data_ptr() % 16, floor == 1.0, specialise(nbr.data_ptr())),
    )


def pool_backward(
    x: torch.Tensor,
    y: torch.Tensor,
    dy: torch.Tensor,
    nbr: torch.Tensor,
    count: torch.Tensor,
    dx: torch.Tensor,
    mode: str,
    target: Target,
) -> None:
    """Write dx [N_in, C], like dy.

    dy: [N_out, C] contiguous, fp16 / bf16 / fp32.  nbr: int32 [V, N_in], the transposed table.  x [N_in, C] and
    y [N_out, C] are read for "max", count int32 [N_out] for "avg".  mode: as of `pool_forward`.
    """
    (n_offsets, n_rows), n_channels = nbr.shape, dx.shape[1]
    constants = (MODES[mode], _ROWS, _channels(n_channels))
    addresses = specialise(x.data_ptr(), y.data_ptr(), dy.data_ptr(), nbr.data_ptr())
    pool_backward_kernel.launch(
        x.device,
        target,
        (cdiv(n_rows, _ROWS), cdiv(n_channels, constants[2]), 1),
        (x, y, dy, nbr, count, dx, n_rows, n_offsets, n_channels),
        constants,
        {"num_warps": 4},
        (constants, x.dtype, addresses),
    )


def first_largest(
    x: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, shares: int, target: Target
) -> torch.Tensor:
    """int64 [shares, S, C]: of rows order[starts[s] : starts[s + 1]] of x [N, C], ascending, in so
    many shares, the first that holds the maximum of its share; -1 where a share has no row."""
    n_channels, n_segments = x.shape[1], starts.shape[0] - 1
    constants = (shares, _ROWS, _channels(n_channels))
    out = torch.empty((shares, n_segments, n_channels), dtype=torch.int64, device=x.device)
    first_largest_kernel.launch(
        x.device,
        target,
        (n_segments, cdiv(n_channels, constants[2]), shares),
        (x, order, starts, out, n_channels, n_segments),
        constants,
        {"num_warps": 4},
        (constants, x.dtype, x.data_ptr() % 16),
    )
    return out
