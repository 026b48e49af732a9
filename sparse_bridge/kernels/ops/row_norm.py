"""Norms of every row by its own mean and variance, for programs without torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import KernelError
from ..runtime.launch import alignment, cdiv, power_of_2, register
from ..runtime.target import Target

MOST_CHANNELS = 4096
_ELEMENTS = 4096  # of a program
OPTIONS = {"num_warps": 4}


@triton.jit(do_not_specialize=["n_rows", "n_channels", "eps"])
def _row_norm(
    x_ptr,
    gain_ptr,
    beta_ptr,
    y_ptr,
    n_rows,
    n_channels,
    eps,
    AFFINE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """grid: (row blocks,). x and y [n_rows, n_channels]; gain and beta fp32 [n_channels], read if AFFINE."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, LANES)[None, :]
    ok = (rows < n_rows) & (channel < n_channels)
    x = tl.load(x_ptr + rows * n_channels + channel, mask=ok, other=0).to(tl.float32)
    mean = tl.sum(x, 1)[:, None] / n_channels
    apart = tl.where(channel < n_channels, x - mean, 0)
    variance = tl.sum(apart * apart, 1)[:, None] / n_channels
    y = apart / tl.sqrt_rn(variance + eps)
    if AFFINE:
        gain = tl.load(gain_ptr + channel, mask=channel < n_channels, other=0)
        y = y * gain + tl.load(beta_ptr + channel, mask=channel < n_channels, other=0)
    tl.store(y_ptr + rows * n_channels + channel, y.to(y_ptr.dtype.element_ty), mask=ok)


row_norm_kernel = register(_row_norm)


def row_norm(
    x: torch.Tensor, vectors: tuple[torch.Tensor, torch.Tensor] | None, eps: float, y: torch.Tensor, target: Target
) -> torch.Tensor:
    """Write y [N, C] = (x - mean) / sqrt(variance + eps) of every row, times the first vector, plus the second.

    x, y: fp16, bf16 or fp32, contiguous.  vectors: fp32 [C].  Raises KernelError above 4096 channels.
    """
    n_rows, n_channels = x.shape
    if n_channels > MOST_CHANNELS:
        raise KernelError(f"a norm of rows of {n_channels} channels; expected at most {MOST_CHANNELS}.")
    lanes = power_of_2(n_channels)
    rows = max(1, _ELEMENTS // lanes)
    gain, beta = (x, x) if vectors is None else vectors
    constants = vectors is not None, rows, lanes
    row_norm_kernel.launch(
        x.device,
        target,
        (cdiv(n_rows, rows), 1, 1),
        (x, gain, beta, y, n_rows, n_channels, eps),
        constants,
        OPTIONS,
        (constants, x.dtype, y.dtype, alignment(x, gain, beta, y)),
    )
    return y
