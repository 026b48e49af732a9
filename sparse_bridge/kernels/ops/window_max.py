"""Maximum over a neighbour table that remembers where it was found; no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import Kernel, alignment, cdiv, power_of_2, register
from ..runtime.target import Target

_ROWS = 32


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_channels"])
def _window_max(
    x_ptr, nbr_ptr, y_ptr, index_ptr, n_rows, n_offsets, n_channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """y[r, c] = largest present x[nbr[v, r], c], a NaN wins; index its smallest row.

    0 and -1 where there is none.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    best = tl.zeros((ROWS, CHANNELS), tl.float32)
    index = tl.zeros((ROWS, CHANNELS), tl.int32) - 1
    for v in range(n_offsets):
        source = tl.load(nbr_ptr + v * n_rows.to(tl.int64) + row, mask=row < n_rows, other=-1)
        ok = (source >= 0)[:, None] & ok_c[None, :]
        offs_x = source.to(tl.int64)[:, None] * n_channels + channel[None, :]
        value = tl.load(x_ptr + offs_x, mask=ok, other=0.0).to(tl.float32)
        nan, best_nan = value != value, best != best
        larger = (value > best) | (nan & (best == best))
        ties = ((value == best) | (nan & best_nan)) & (source[:, None] < index)
        take = ok & ((index < 0) | larger | ties)
        best = tl.where(take, value, best)
        index = tl.where(take, source[:, None], index)
    out = row.to(tl.int64)[:, None] * n_channels + channel[None, :]
    inside = (row < n_rows)[:, None] & ok_c[None, :]
    tl.store(y_ptr + out, best.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(index_ptr + out, index, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_channels"])
def _window_max_backward(
    dy_ptr, index_ptr, nbr_ptr, dx_ptr, n_rows, n_offsets, n_channels, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """dx[r, c] = sum of dy over the windows of row r (transposed table) whose maximum is row r."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    for v in range(n_offsets):
        window = tl.load(nbr_ptr + v * n_rows.to(tl.int64) + row, mask=row < n_rows, other=-1)
        ok = (window >= 0)[:, None] & ok_c[None, :]
        offs_y = window.to(tl.int64)[:, None] * n_channels + channel[None, :]
        argmax = tl.load(index_ptr + offs_y, mask=ok, other=-1)
        gradient = tl.load(dy_ptr + offs_y, mask=ok, other=0.0).to(tl.float32)
        acc += tl.where(ok & (argmax == row[:, None]), gradient, 0.0)
    out = dx_ptr + row.to(tl.int64)[:, None] * n_channels + channel[None, :]
    tl.store(out, acc.to(dx_ptr.dtype.element_ty), mask=(row < n_rows)[:, None] & ok_c[None, :])


forward_kernel = register(_window_max)
backward_kernel = register(_window_max_backward)


def _launch(
    kernel: Kernel, tensors: tuple[torch.Tensor, ...], nbr: torch.Tensor, n_channels: int, target: Target
) -> None:
    n_offsets, n_rows = nbr.shape
    constants = (_ROWS, min(128, max(16, power_of_2(n_channels))))
    grid = (cdiv(n_rows, _ROWS), cdiv(n_channels, constants[1]), 1)
    key = (constants, tensors[0].dtype, alignment(*tensors))
    args = (*tensors, n_rows, n_offsets, n_channels)
    kernel.launch(nbr.device, target, grid, args, constants, {"num_warps": 4}, key)


def window_max(x: torch.Tensor, nbr: torch.Tensor, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [N_out, C], like x; int32 [N_out, C], the rows of the maxima, -1 where there is none).

    x: [N_in, C] contiguous, fp16 / bf16 / fp32.  nbr: int32 [V, N_out]. Of equal values the smallest row counts.
    """
    y = x.new_empty((nbr.shape[1], x.shape[1]))
    index = torch.empty(y.shape, dtype=torch.int32, device=x.device)
    _launch(forward_kernel, (x, nbr, y, index), nbr, x.shape[1], target)
    return y, index


def window_max_backward(dy: torch.Tensor, index: torch.Tensor, nbr: torch.Tensor, target: Target) -> torch.Tensor:
    """dx [N_in, C], like dy.

    dy: [N_out, C] contiguous, fp16 / bf16 / fp32.  index: int32 [N_out, C] of `window_max`.  nbr: int32 [V, N_in], the
    transposed table. Sums run in fp32.
    """
    dx = dy.new_empty((nbr.shape[1], dy.shape[1]))
    _launch(backward_kernel, (dy, index, nbr, dx), nbr, dy.shape[1], target)
    return dx
