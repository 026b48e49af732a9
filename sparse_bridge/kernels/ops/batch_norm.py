"""Batch normalisation of rows in training, with a ReLU behind it: two launches forward, two back.

Rows are cut into a few parts, each of which leaves two sums per channel in a shared piece of
memory; every program of the second launch merges those of its channels again. Sums are fp32, in a
fixed order, without atomics.

memory is fp32 `[2 + 2 * parts, C]`: mean and 1 / standard deviation, then two rows for each part.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..maps.coord_key import live_rows
from ..runtime.launch import cdiv, register, specialise
from ..runtime.target import Target

TILE = 8192  # values of a step
PARTS = 128
PROGRAMS = 1  # of a compute unit
OPTIONS = {"num_warps": 16}


@triton.jit
def _part_rows(live, n_parts, ROWS: tl.constexpr):
    """Rows of a part; the last ones may have fewer, or none."""
    return tl.cdiv(tl.cdiv(live, n_parts), ROWS) * ROWS


@triton.jit
def span(rows, ROWS: tl.constexpr):
    """(first row, the row behind the last) of this program's part of the rows."""
    share = _part_rows(rows, tl.num_programs(0), ROWS)
    begin = tl.program_id(0) * share
    return begin, tl.minimum(rows, begin + share)


@triton.jit
def affine(gain_ptr, beta_ptr, channel, n_channels, has_gain, has_beta):
    """(weight, bias) of the channels in fp32; 1 and 0 where there are none."""
    gain = tl.load(gain_ptr + channel, mask=channel < n_channels * has_gain, other=1.0)
    beta = tl.load(beta_ptr + channel, mask=channel < n_channels * has_beta, other=0.0)
    return gain.to(tl.float32), beta.to(tl.float32)


@triton.jit
def saved(memory_ptr, channel, ok_c, n_channels):
    """(mean, 1 / standard deviation) of the channels, from the forward pass."""
    mean = tl.load(memory_ptr + channel, mask=ok_c, other=0.0)
    return mean, tl.load(memory_ptr + n_channels + channel, mask=ok_c, other=0.0)


@triton.jit
def normal(
    x_ptr, place, ok, mean, invstd, gain, beta, relu, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """(x normalised, what follows from it as x's dtype holds it, whether a ReLU cuts that off).

    Forward and backward must round alike, hence one function and no free choice of contraction."""
    x = tl.load(x_ptr + place, mask=ok, other=0.0)
    xhat = (x.to(tl.float32) - mean[None, :]) * invstd[None, :]
    wide_gain = tl.broadcast_to(gain[None, :], (ROWS, CHANNELS))
    wide_beta = tl.broadcast_to(beta[None, :], (ROWS, CHANNELS))
    y = tl.fma(xhat, wide_gain, wide_beta).to(x.dtype).to(tl.float32)
    # A flag of one value is widened before it is compared: Triton 3.9's interpreter needs that.
    rectified = tl.zeros((ROWS, CHANNELS), tl.int32) + relu
    return xhat, y, (rectified > 0) & (y <= 0)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted"])
def _batch_norm_partials(
    x_ptr, count_ptr, memory_ptr, n_rows, n_channels, counted,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Mean of a part, and the sum of squared distances from it.

    Every lane follows its rows by Welford's rule; then lanes merge by Chan's."""
    lane = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    live = live_rows(count_ptr, n_rows, counted)
    begin, end = span(live, ROWS)
    shift = begin.to(tl.int64) * n_channels
    place = lane[:, None] * n_channels + channel[None, :]
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    spread = tl.zeros((ROWS, CHANNELS), tl.float32)
    seen = tl.zeros((1, 1), tl.float32)
    for start in range(begin, end, ROWS):
        ok = (start + lane < end)[:, None] & ok_c[None, :]
        x = tl.load(x_ptr + shift + place, mask=ok, other=0.0).to(tl.float32)
        seen += 1.0
        delta = tl.where(ok, x - mean, 0.0)
        mean += delta * (1.0 / seen)
        spread += delta * (x - mean)
        shift += ROWS * n_channels
    rows = (tl.maximum(end - begin - lane, 0) + ROWS - 1) // ROWS
    rows = rows.to(tl.float32)[:, None]
    total = tl.maximum(end - begin, 1).to(tl.float32)
    # Relative to one lane, so that a large common offset does not round the sum.
    origin = tl.sum(tl.where(lane[:, None] == 0, mean, 0.0), 0)
    average = origin + tl.sum((mean - origin[None, :]) * rows, 0) / total
    delta = mean - average[None, :]
    spread = tl.sum(spread + delta * delta * rows, 0)
    out_ptr = memory_ptr + (2 + 2 * tl.program_id(0)) * n_channels + channel
    tl.store(out_ptr, average, mask=ok_c)
    tl.store(out_ptr + n_channels, spread, mask=ok_c)


@triton.jit
def _merged(
    memory_ptr, channel, ok_c, live, n_channels, n_parts,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """(mean, sum of squared distances from it) of the channels over all parts."""
    part = tl.arange(0, PARTS)
    share = _part_rows(live, n_parts, ROWS)
    rows = tl.minimum(tl.maximum(live - tl.minimum(part, n_parts) * share, 0), share)
    ok = (rows > 0)[:, None] & ok_c[None, :]
    rows = rows.to(tl.float32)[:, None]
    place = memory_ptr + (2 + 2 * part)[:, None] * n_channels + channel[None, :]
    means = tl.load(place, mask=ok, other=0.0)
    spreads = tl.load(place + n_channels, mask=ok, other=0.0)
    origin = tl.sum(tl.where(part[:, None] == 0, means, 0.0), 0)
    total = tl.maximum(live, 1).to(tl.float32)
    delta = tl.where(ok, means - origin[None, :], 0.0)
    mean = origin + tl.sum(delta * rows, 0) / total
    delta = tl.where(ok, means - mean[None, :], 0.0)
    return mean, tl.sum(spreads + delta * delta * rows, 0)


@triton.jit
def _update(ptr, channel, ok, value, momentum):
    """Move a running statistic towards `value`."""
    old = tl.load(ptr + channel, mask=ok, other=0.0).to(tl.float32)
    new = (1.0 - momentum) * old + momentum * value
    tl.store(ptr + channel, new.to(ptr.dtype.element_ty), mask=ok)


@triton.jit(
    do_not_specialize=[
        "gain_ptr", "beta_ptr", "mean_ptr", "var_ptr", "batches_ptr", "count_ptr", "n_rows",
        "n_parts", "counted", "has_gain", "has_beta", "has_mean", "has_batches", "relu",
        "momentum", "eps",
    ]
)  # fmt: skip
def _batch_norm_apply(
    x_ptr, y_ptr, gain_ptr, beta_ptr, mean_ptr, var_ptr, batches_ptr, count_ptr, memory_ptr,
    n_rows, n_channels, n_parts, counted, has_gain, has_beta, has_mean, has_batches, relu,
    momentum, eps, PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y, and once: statistics for the gradient, running statistics, the number of batches. Rows
    that are not there become 0; running statistics need two rows."""
    lane = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    live = live_rows(count_ptr, n_rows, counted)
    mean, spread = _merged(
        memory_ptr, channel, ok_c, live, n_channels, n_parts, PARTS, ROWS, CHANNELS
    )
    invstd = 1.0 / tl.sqrt(spread / tl.maximum(live, 1).to(tl.float32) + eps)
    if tl.program_id(0) == 0:
        tl.store(memory_ptr + channel, mean, mask=ok_c)
        tl.store(memory_ptr + n_channels + channel, invstd, mask=ok_c)
        enough = tl.minimum(tl.maximum(live - 1, 0), 1)
        ok = channel < n_channels * has_mean * enough
        _update(mean_ptr, channel, ok, mean, momentum)
        variance = spread / tl.maximum(live - 1, 1).to(tl.float32)
        _update(var_ptr, channel, ok, variance, momentum)
        first = channel < has_batches * enough
        batches = tl.load(batches_ptr + channel, mask=first, other=0)
        tl.store(batches_ptr + channel, batches + 1, mask=first)
    gain, beta = affine(gain_ptr, beta_ptr, channel, n_channels, has_gain, has_beta)
    begin, end = span(n_rows, ROWS)
    shift = begin.to(tl.int64) * n_channels
    place = lane[:, None] * n_channels + channel[None, :]
    for start in range(begin, end, ROWS):
        row = start + lane
        ok = (row < live)[:, None] & ok_c[None, :]
        _, y, cut = normal(x_ptr + shift, place, ok, mean, invstd, gain, beta, relu, ROWS, CHANNELS)
        y = tl.where(cut | (row >= live)[:, None], 0.0, y).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + shift + place, y, mask=(row < end)[:, None] & ok_c[None, :])
        shift += ROWS * n_channels


partials_kernel = register(_batch_norm_partials)
apply_kernel = register(_batch_norm_apply)


def tile_of(channels: int, even: bool) -> tuple[int, int]:
    """(rows, channels) of a step.  even: rows start at multiples of 16 bytes; others are read value
    by value, each with an address of its own in registers."""
    return (TILE if even else TILE // 2) // channels, channels


class Cut(NamedTuple):
    """How rows and channels are dealt out.

    programs: of the second launch, by rows.  blocks: of channels.  tile: see `tile_of`.
    """

    parts: int
    programs: int
    blocks: int
    tile: tuple[int, int]

    @staticmethod
    def of(n_rows: int, n_channels: int, aligned: bool, target: Target) -> Cut:
        """aligned: to 16 bytes, every tensor of rows."""
        return _cut(n_rows, n_channels, aligned, target.compute_units)


@functools.lru_cache(maxsize=1024)  # both passes of all layers of a scene ask
def _cut(n_rows: int, n_channels: int, aligned: bool, compute_units: int) -> Cut:
    channels = 16 if n_channels <= 16 else 32
    tile = tile_of(channels, aligned and n_channels % 16 == 0)
    blocks = cdiv(n_channels, channels)
    programs = max(1, min(cdiv(n_rows, tile[0]), PROGRAMS * compute_units // blocks))
    return Cut(min(programs, PARTS), programs, blocks, tile)


@functools.cache
def unread(device: torch.device) -> torch.Tensor:
    """Stands for a counter that nobody looks at."""
    return torch.empty(1, dtype=torch.int32, device=device)


def batch_norm_memory(x: torch.Tensor, target: Target) -> torch.Tensor:
    """Uninitialised `memory` for x [N, C]."""
    n_rows, n_channels = x.shape
    parts = Cut.of(n_rows, n_channels, x.data_ptr() % 16 == 0, target).parts
    return torch.empty((2 + 2 * parts) * n_channels, dtype=torch.float32, device=x.device)


def batch_norm_forward(
    x: torch.Tensor, gain: torch.Tensor | None, beta: torch.Tensor | None,
    running: tuple[torch.Tensor, torch.Tensor] | None, batches: torch.Tensor | None,
    count: torch.Tensor | None, memory: torch.Tensor, y: torch.Tensor, momentum: float, eps: float,
    relu: bool, target: Target,
) -> None:  # fmt: skip
    """Write y [N, C] and, of `memory`, what the gradient needs.

    x: [N, C] contiguous, fp16 / bf16 / fp32, y alike.  gain, beta: [C].  running: mean and variance
    [C], updated by `momentum`.  batches: int64, counted up.  count: int32 [1], one less than the
    rows that there are.
    """
    n_rows, n_channels = x.shape
    aligned = x.data_ptr() % 16 == 0
    parts, programs, blocks, tile = Cut.of(n_rows, n_channels, aligned, target)
    counted = 0 if count is None else 1
    rows = unread(x.device) if count is None else count
    shape = (tile, x.dtype, aligned, specialise(n_channels))
    partials_kernel.launch(
        x.device, target, (parts, blocks, 1), (x, rows, memory, n_rows, n_channels, counted), tile,
        OPTIONS, shape,
    )  # fmt: skip
    w, b = memory if gain is None else gain, memory if beta is None else beta
    mean, var = (memory, memory) if running is None else running
    steps = memory if batches is None else batches
    args = (
        x, y, w, b, mean, var, steps, rows, memory, n_rows, n_channels, parts, counted,
        int(gain is not None), int(beta is not None), int(running is not None),
        int(batches is not None), int(relu), float(momentum), float(eps),
    )  # fmt: skip
    key = (shape, w.dtype, b.dtype, mean.dtype, var.dtype, steps.dtype)
    apply_kernel.launch(x.device, target, (programs, blocks, 1), args, (PARTS, *tile), OPTIONS, key)
