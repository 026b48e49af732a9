"""Depthwise convolution over a neighbour table: one weight per offset and channel; no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import alignment, cdiv, power_of_2, register
from ..runtime.target import Target

_ROWS = 32
_MAX_SHARES = 64


@triton.jit(
    do_not_specialize=["n_rows", "n_offsets", "n_channels", "stride_wv", "stride_wc", "first_offset", "offset_step"]
)
def _channelwise_gather(
    x_ptr,
    w_ptr,
    nbr_ptr,
    y_ptr,
    n_rows,
    n_offsets,
    n_channels,
    stride_wv,
    stride_wc,
    first_offset,
    offset_step,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y[r, c] = sum over v of x[nbr[v, r], c] * w[first_offset + v * offset_step, c]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    for v in range(n_offsets):
        source = tl.load(nbr_ptr + v * n_rows.to(tl.int64) + row, mask=row < n_rows, other=-1)
        at = (first_offset + v * offset_step) * stride_wv + channel * stride_wc
        w = tl.load(w_ptr + at, mask=ok_c, other=0.0).to(tl.float32)
        ok = (source >= 0)[:, None] & ok_c[None, :]
        offs_x = source.to(tl.int64)[:, None] * n_channels + channel[None, :]
        acc += tl.load(x_ptr + offs_x, mask=ok, other=0.0).to(tl.float32) * w[None, :]
    out = y_ptr + row.to(tl.int64)[:, None] * n_channels + channel[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(row < n_rows)[:, None] & ok_c[None, :])


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_channels", "share_rows"])
def _channelwise_wgrad(
    x_ptr,
    dy_ptr,
    nbr_ptr,
    part_ptr,
    n_rows,
    n_offsets,
    n_channels,
    share_rows,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """part[s, v, c] = sum over the rows r of share s of x[nbr[v, r], c] * dy[r, c], in fp32."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    v = tl.program_id(1)
    begin = tl.program_id(2) * share_rows
    end = tl.minimum(n_rows, begin + share_rows)
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        source = tl.load(nbr_ptr + v.to(tl.int64) * n_rows + row, mask=row < end, other=-1)
        ok = (source >= 0)[:, None] & ok_c[None, :]
        offs_x = source.to(tl.int64)[:, None] * n_channels + channel[None, :]
        offs_dy = row.to(tl.int64)[:, None] * n_channels + channel[None, :]
        x = tl.load(x_ptr + offs_x, mask=ok, other=0.0).to(tl.float32)
        acc += x * tl.load(dy_ptr + offs_dy, mask=ok, other=0.0).to(tl.float32)
    out = (tl.program_id(2) * n_offsets + v).to(tl.int64) * n_channels + channel
    tl.store(part_ptr + out, tl.sum(acc, 0), mask=ok_c)


gather_kernel = register(_channelwise_gather)
wgrad_kernel = register(_channelwise_wgrad)


def _channels(n_channels: int) -> int:
    return min(128, max(16, power_of_2(n_channels)))


def channelwise_gather(
    x: torch.Tensor, weight: torch.Tensor, nbr: torch.Tensor, y: torch.Tensor, reverse: bool, target: Target
) -> None:
    """Write y [n_rows, C] from x [n_in, C] and weight [V, C] (any strides) along nbr [V, n_rows].

    x and y contiguous, one dtype for x, weight and y.  reverse: row v of nbr is offset V-1-v.
    """
    (n_offsets, n_rows), n_channels = nbr.shape, x.shape[1]
    constants = (_ROWS, _channels(n_channels))
    order = (n_offsets - 1, -1) if reverse else (0, 1)
    grid = (cdiv(n_rows, _ROWS), cdiv(n_channels, constants[1]), 1)
    args = (x, weight, nbr, y, n_rows, n_offsets, n_channels, *weight.stride(), *order)
    key = (constants, x.dtype, alignment(x, weight, nbr, y))
    gather_kernel.launch(x.device, target, grid, args, constants, {"num_warps": 4}, key)


def channelwise_wgrad(x: torch.Tensor, dy: torch.Tensor, nbr: torch.Tensor, target: Target) -> torch.Tensor:
    """dw [V, C] fp32 from x [n_in, C] and dy [n_rows, C], contiguous, along nbr [V, n_rows]."""
    (n_offsets, n_rows), n_channels = nbr.shape, x.shape[1]
    constants = (_ROWS, _channels(n_channels))
    blocks = cdiv(n_channels, constants[1])
    filling = cdiv(4 * target.compute_units, n_offsets * blocks)
    shares = max(1, min(_MAX_SHARES, filling, cdiv(n_rows, 4 * _ROWS)))
    share_rows = cdiv(cdiv(n_rows, shares), _ROWS) * _ROWS
    part = torch.empty((shares, n_offsets, n_channels), dtype=torch.float32, device=x.device)
    args = (x, dy, nbr, part, n_rows, n_offsets, n_channels, share_rows)
    key = (constants, x.dtype, alignment(x, dy, nbr, part))
    wgrad_kernel.launch(x.device, target, (blocks, n_offsets, shares), args, constants, {"num_warps": 4}, key)
    return part.sum(0)
