"""Sums over segments of a sorted list: of the points of a voxel, say.

No floats are added atomically, so that results do not depend on the order of execution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import alignment, cdiv, power_of_2, register
from ..runtime.target import Target

_SEGMENTS, _LANES = 4, 8  # of a program of `_segment_sum`: it reads a lane's entry at once
CHUNK = 256  # entries that lanes add up one after another
_FEW = 64  # segments whose chunks are worth programs of their own
_MOST_PARTS = 1 << 16  # chunks of all segments together, up to which those of more long segments are worth it, too


@triton.jit
def _joined(acc, SEGMENTS: tl.constexpr, LANES: tl.constexpr):
    """The sums over the lanes of every segment."""
    return tl.sum(tl.reshape(acc, (SEGMENTS, LANES, acc.shape[1])), 1)


@triton.jit
def _lane_sums(
    x_ptr,
    order_ptr,
    weight_ptr,
    begin,
    end,
    channel,
    ok_c,
    n_channels,
    K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    FP64: tl.constexpr,
    LANES: tl.constexpr,
):
    """What each lane adds up of the entries begin .. end - 1 of its segment: every LANES-th."""
    lane = tl.arange(0, begin.shape[0])
    acc = tl.zeros((begin.shape[0], channel.shape[0]), tl.float64 if FP64 else tl.float32)
    for step in range(0, tl.max(end - begin, 0).to(tl.int32), LANES):
        offs = begin + step + lane % LANES
        entry = tl.load(order_ptr + offs, mask=offs < end, other=0)
        ok = (offs < end)[:, None] & ok_c[None, :]
        row = (entry // K).to(tl.int64)[:, None]
        value = tl.load(x_ptr + row * n_channels + channel[None, :], mask=ok, other=0.0)
        value = value.to(acc.dtype)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + entry, mask=offs < end, other=0.0).to(acc.dtype)
            value = value * weight[:, None]
        acc += value
    return acc


@triton.jit
def _store_sums(total, count_ptr, y_ptr, segment, n_segments, channel, ok_c, n_channels, HAS_COUNT: tl.constexpr):
    """y[s, c] = total / count[s]; a count of 0 gives 0."""
    ok = segment < n_segments
    if HAS_COUNT:
        count = tl.load(count_ptr + segment, mask=ok, other=0).to(total.dtype)[:, None]
        total = tl.where(count > 0, total / tl.where(count > 0, count, 1.0), 0.0)
    out = y_ptr + segment.to(tl.int64)[:, None] * n_channels + channel[None, :]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=ok[:, None] & ok_c[None, :])


@triton.jit(do_not_specialize=["n_segments", "n_channels"])
def _segment_sum(
    x_ptr,
    order_ptr,
    starts_ptr,
    weight_ptr,
    count_ptr,
    y_ptr,
    n_segments,
    n_channels,
    K: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    FP64: tl.constexpr,
    CUT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y[s, c] = sum of weight[e] * x[e // K, c] over the entries e = order[starts[s] : starts[s +
    1]], / count[s].

    A program takes SEGMENTS segments. The sums of CHUNK entries are taken by lanes, and those of
    chunks again: the order depends on nothing but the segment's own length.  CUT: one chunk alone,
    that of program_id(2), into y [chunks, S, C], for `_chunk_sum`.
    """
    lane = tl.arange(0, SEGMENTS * LANES)
    segment = tl.program_id(0) * SEGMENTS + lane // LANES
    out_segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c = channel < n_channels
    begin = tl.load(starts_ptr + segment, mask=segment < n_segments, other=0)
    end = tl.load(starts_ptr + segment + 1, mask=segment < n_segments, other=0)
    if CUT:
        first = begin + tl.program_id(2) * CHUNK
        acc = _lane_sums(
            x_ptr,
            order_ptr,
            weight_ptr,
            first,
            tl.minimum(end, first + CHUNK),
            channel,
            ok_c,
            n_channels,
            K,
            HAS_WEIGHT,
            FP64,
            LANES,
        )
        y_ptr += tl.program_id(2).to(tl.int64) * n_segments * n_channels
    else:
        # The sum of a single chunk is that of its lanes: all that would be added to it is 0.
        n_chunks = tl.cdiv(tl.max(end - begin, 0), CHUNK).to(tl.int32)
        last = tl.where(n_chunks > 1, begin, end)
        acc = _lane_sums(
            x_ptr, order_ptr, weight_ptr, begin, last, channel, ok_c, n_channels, K, HAS_WEIGHT, FP64, LANES
        )
        for chunk in range(tl.where(n_chunks > 1, n_chunks, 0)):
            first = begin + chunk * CHUNK
            part = _lane_sums(
                x_ptr,
                order_ptr,
                weight_ptr,
                first,
                tl.minimum(end, first + CHUNK),
                channel,
                ok_c,
                n_channels,
                K,
                HAS_WEIGHT,
                FP64,
                LANES,
            )
            part = _joined(part, SEGMENTS, LANES)[:, None, :]
            part = tl.reshape(tl.broadcast_to(part, (SEGMENTS, LANES, CHANNELS)), (SEGMENTS * LANES, CHANNELS))
            acc += tl.where((lane % LANES == chunk % LANES)[:, None], part, 0.0)
    total = _joined(acc, SEGMENTS, LANES)
    _store_sums(total, count_ptr, y_ptr, out_segment, n_segments, channel, ok_c, n_channels, HAS_COUNT)


@triton.jit(do_not_specialize=["n_segments", "n_channels"])
def _chunk_sum(
    part_ptr,
    starts_ptr,
    count_ptr,
    y_ptr,
    n_segments,
    n_channels,
    HAS_COUNT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """y[s, c] = sum of part[k, s, c] over the chunks of segment s, / count[s], in the order of
    `_segment_sum`."""
    lane = tl.arange(0, SEGMENTS * LANES)
    segment = tl.program_id(0) * SEGMENTS + lane // LANES
    out_segment = tl.program_id(0) * SEGMENTS + tl.arange(0, SEGMENTS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    ok_c, ok = channel < n_channels, segment < n_segments
    begin = tl.load(starts_ptr + segment, mask=ok, other=0)
    length = tl.load(starts_ptr + segment + 1, mask=ok, other=0) - begin
    acc = tl.zeros((SEGMENTS * LANES, CHANNELS), part_ptr.dtype.element_ty)
    n_chunks = tl.cdiv(tl.max(length, 0), CHUNK).to(tl.int32)
    for step in range(0, n_chunks, LANES):
        chunk = step + lane % LANES
        row = chunk.to(tl.int64) * n_segments + segment
        mask = (ok & (chunk * CHUNK < length))[:, None] & ok_c[None, :]
        at = part_ptr + row[:, None] * n_channels + channel[None, :]
        acc += tl.load(at, mask=mask, other=0.0)
    total = _joined(acc, SEGMENTS, LANES)
    _store_sums(total, count_ptr, y_ptr, out_segment, n_segments, channel, ok_c, n_channels, HAS_COUNT)


segment_sum_kernel = register(_segment_sum)
chunk_sum_kernel = register(_chunk_sum)

# Lanes of one warp are added up without shared memory and its barriers, which took most of the time.
OPTIONS = {"num_warps": 1}


def channel_block(n_channels: int, dtype: torch.dtype) -> int:
    """Channels of a program, whose sums lie in the registers of one warp; those of fp64 take twice as many."""
    return min(16 if dtype == torch.float64 else 32, max(16, power_of_2(n_channels)))


def segment_sum(
    x: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor | None,
    count: torch.Tensor | None,
    y: torch.Tensor,
    per_row: int,
    target: Target,
) -> None:
    """Write y [S, C]: over the entries e = order[starts[s] : starts[s + 1]], the sum of weight[e] *
    x[e // per_row], divided by count[s].

    x [N, C] and weight [N * per_row] contiguous floats; order [E] and starts [S + 1] int64 or int32; count [S]
    integers. y is of any float dtype. Sums are fp32, of fp64 fp64.
    """
    n_segments, n_channels = y.shape
    n_chunks = cdiv(order.shape[0], CHUNK)
    long = order.shape[0] > CHUNK * n_segments and n_segments * n_chunks <= _MOST_PARTS
    if n_chunks < 2 or not (long or n_segments <= _FEW):
        _segment_sums(x, order, starts, weight, count, y, (per_row, 0), target)
        return
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    part = torch.empty((n_chunks, n_segments, n_channels), dtype=wide, device=x.device)
    _segment_sums(x, order, starts, weight, None, part, (per_row, n_chunks), target)
    channels = channel_block(n_channels, x.dtype)
    constants = (count is not None, _SEGMENTS, _LANES, CHUNK, channels)
    count_arg = starts if count is None else count
    grid = (cdiv(n_segments, _SEGMENTS), cdiv(n_channels, channels), 1)
    key = constants, wide, y.dtype, starts.dtype, count_arg.dtype
    chunk_sum_kernel.launch(
        x.device,
        target,
        grid,
        (part, starts, count_arg, y, n_segments, n_channels),
        constants,
        OPTIONS,
        (key, alignment(part, starts, count_arg, y)),
    )


def _segment_sums(
    x: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor | None,
    count: torch.Tensor | None,
    y: torch.Tensor,
    form: tuple[int, int],
    target: Target,
) -> None:
    """form: entries of a row, and chunks that are added up apart, 0 for none."""
    n_segments, n_channels = y.shape[-2:]
    per_row, n_chunks = form
    channels = channel_block(n_channels, x.dtype)
    constants = (
        per_row,
        weight is not None,
        count is not None,
        x.dtype == torch.float64,
        n_chunks > 0,
        _SEGMENTS,
        _LANES,
        CHUNK,
        channels,
    )
    grid = (cdiv(n_segments, _SEGMENTS), cdiv(n_channels, channels), max(1, n_chunks))
    weight_arg, count_arg = (x if weight is None else weight), (starts if count is None else count)
    key = constants, *(tensor.dtype for tensor in (x, y, weight_arg, order, starts, count_arg))
    aligned = alignment(x, order, starts, weight_arg, count_arg, y)
    segment_sum_kernel.launch(
        x.device,
        target,
        grid,
        (x, order, starts, weight_arg, count_arg, y, n_segments, n_channels),
        constants,
        OPTIONS,
        (key, aligned),
    )
