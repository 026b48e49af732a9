"""Batch normalisation of rows in training, with a ReLU behind it: two launches forward, two back.

Rows are cut into a few parts, each of which leaves two sums per channel in a shared piece of
memory; every program of the second launch merges those of its channels again. Sums are fp32, in a
fixed order, without atomics.

memory is fp32 `[2 + 2 * parts, C]`: mean and 1 / standard deviation, then two rows for each part.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..maps.coord_key import live_rows
from ..runtime.launch import register
from .norm_spec import PARTS, NormSpec, Vectors, cut_of

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
def store_zeros(y_ptr, live, n_rows, n_channels, offs, ok_c, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Zeros in the rows from `live` on, of which every program takes its part. offs: of a step, see `normal`."""
    begin, end = span(n_rows - live, ROWS)
    shift = (live + begin).to(tl.int64) * n_channels
    lane = tl.arange(0, ROWS)
    zeros = tl.zeros((ROWS, CHANNELS), y_ptr.dtype.element_ty)
    for start in range(begin, end, ROWS):
        tl.store(y_ptr + shift + offs, zeros, mask=(start + lane < end)[:, None] & ok_c[None, :])
        shift += ROWS * n_channels


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
def normal(x_ptr, offs, ok, mean, invstd, gain, beta, relu, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """(x normalised, what follows from it as x's dtype holds it, whether a ReLU cuts that off).

    Forward and backward must round alike, hence one function and no free choice of contraction."""
    x = tl.load(x_ptr + offs, mask=ok, other=0.0)
    xhat = (x.to(tl.float32) - mean[None, :]) * invstd[None, :]
    wide_gain = tl.broadcast_to(gain[None, :], (ROWS, CHANNELS))
    wide_beta = tl.broadcast_to(beta[None, :], (ROWS, CHANNELS))
    y = tl.fma(xhat, wide_gain, wide_beta).to(x.dtype).to(tl.float32)
    # A flag of one value is widened before it is compared: Triton 3.9's interpreter needs that.
    rectified = tl.zeros((ROWS, CHANNELS), tl.int32) + relu
    return xhat, y, (rectified > 0) & (y <= 0)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted"])
def _batch_norm_partials(
    x_ptr, count_ptr, memory_ptr, n_rows, n_channels, counted, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Mean of a part, and the sum of squared distances from it.

    Every lane follows its rows by Welford's rule; then lanes merge by Chan's."""
    lane = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    live = live_rows(count_ptr, n_rows, counted)
    begin, end = span(live, ROWS)
    shift = begin.to(tl.int64) * n_channels
    offs = lane[:, None] * n_channels + channel[None, :]
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    spread = tl.zeros((ROWS, CHANNELS), tl.float32)
    seen = tl.zeros((1, 1), tl.float32)
    for start in range(begin, end, ROWS):
        ok = (start + lane < end)[:, None] & ok_c[None, :]
        x = tl.load(x_ptr + shift + offs, mask=ok, other=0.0).to(tl.float32)
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
    memory_ptr,
    channel,
    ok_c,
    live,
    n_channels,
    n_parts,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """(mean, sum of squared distances from it) of the channels over all parts."""
    part = tl.arange(0, PARTS)
    share = _part_rows(live, n_parts, ROWS)
    rows = tl.minimum(tl.maximum(live - tl.minimum(part, n_parts) * share, 0), share)
    ok = (rows > 0)[:, None] & ok_c[None, :]
    rows = rows.to(tl.float32)[:, None]
    address = memory_ptr + (2 + 2 * part)[:, None] * n_channels + channel[None, :]
    means = tl.load(address, mask=ok, other=0.0)
    spreads = tl.load(address + n_channels, mask=ok, other=0.0)
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
        "gain_ptr",
        "beta_ptr",
        "mean_ptr",
        "var_ptr",
        "batches_ptr",
        "count_ptr",
        "n_rows",
        "n_parts",
        "counted",
        "has_gain",
        "has_beta",
        "has_mean",
        "has_batches",
        "relu",
        "momentum",
        "eps",
    ]
)
def _batch_norm_apply(
    x_ptr,
    y_ptr,
    gain_ptr,
    beta_ptr,
    mean_ptr,
    var_ptr,
    batches_ptr,
    count_ptr,
    memory_ptr,
    n_rows,
    n_channels,
    n_parts,
    counted,
    has_gain,
    has_beta,
    has_mean,
    has_batches,
    relu,
    momentum,
    eps,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y, and once: statistics for the gradient, running statistics, the number of batches. Rows
    that are not there become 0; running statistics need two rows."""
    lane = tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    live = live_rows(count_ptr, n_rows, counted)
    mean, spread = _merged(memory_ptr, channel, ok_c, live, n_channels, n_parts, PARTS, ROWS, CHANNELS)
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
    begin, end = span(live, ROWS)
    shift = begin.to(tl.int64) * n_channels
    offs = lane[:, None] * n_channels + channel[None, :]
    for start in range(begin, end, ROWS):
        ok = (start + lane < end)[:, None] & ok_c[None, :]
        _, y, cut = normal(x_ptr + shift, offs, ok, mean, invstd, gain, beta, relu, ROWS, CHANNELS)
        tl.store(y_ptr + shift + offs, tl.where(cut, 0.0, y).to(y_ptr.dtype.element_ty), mask=ok)
        shift += ROWS * n_channels
    store_zeros(y_ptr, live, n_rows, n_channels, offs, ok_c, ROWS, CHANNELS)


partials_kernel = register(_batch_norm_partials)
apply_kernel = register(_batch_norm_apply)


@functools.cache
def unread(device: torch.device) -> torch.Tensor:
    """Stands for a counter that nobody looks at: int32 [1], of any value."""
    return torch.empty(1, dtype=torch.int32, device=device)


def batch_norm_forward(
    spec: NormSpec,
    x: torch.Tensor,
    vectors: Vectors,
    count: torch.Tensor | None,
    y: torch.Tensor,
    momentum: float,
    eps: float,
    relu: bool,
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write y [N, C]; returns `memory` with what the gradient needs.

    x: [N, C] contiguous, fp16 / bf16 / fp32, y alike.  vectors: [C], in x's dtype or fp32; running statistics
    are updated by `momentum`, the number of batches, int64, is counted up.  count: int32 [1], one less than the
    rows that there are; None: all are.  memory: fp32 [(2 + 2 * PARTS) * C], where the caller has it.

    torch's rule: rows are normalised by their biased variance, the running one moves towards the unbiased.
    """
    n_rows, n_channels = x.shape
    aligned = x.data_ptr() % 16 == 0
    parts, programs, blocks, tile = cut_of(n_rows, n_channels, aligned, spec.units)
    if memory is None:
        memory = x.new_empty((2 + 2 * parts) * n_channels, dtype=torch.float32)
    counted, rows = (0, unread(spec.device)) if count is None else (1, count)
    device, target = spec.device, spec.target
    partials_kernel.launch_plain(
        device,
        target,
        (parts, blocks, 1),
        (x, rows, memory),
        (n_rows, n_channels, counted),
        tile,
        OPTIONS,
        (spec.rows_key, tile, aligned),
    )
    read = [memory if vector is None else vector for vector in vectors]
    numbers = (n_rows, n_channels, parts, counted, *spec.present, int(relu), float(momentum), float(eps))
    apply_kernel.launch_plain(
        device,
        target,
        (programs, blocks, 1),
        (x, y, *read, rows, memory),
        numbers,
        (PARTS, *tile),
        OPTIONS,
        (spec.vectors_key, tile, aligned),
    )
    return memory
