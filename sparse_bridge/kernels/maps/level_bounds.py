"""Bounds of levels of a scene, worked out on the device from those of coordinates.

A rule along an axis is five numbers (multiplier, divisor, first, last, from_zero): bounds (low,
high) become (ceil((low * multiplier + first) / divisor), floor((high * multiplier + last) /
divisor)), the lower one not below 0 if `from_zero` and low is not. `levels` is an int32 table
[n_levels, 2 + depth * D * 5]: of a level its place among the records, how many rules lead there
from the coordinates, and these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import register
from ..runtime.target import Target

RULE = 5


@triton.jit
def _floored(number, divisor):
    """floor(number / divisor), however `//` rounds; divisor > 0."""
    quotient = number // divisor
    return quotient - (number - quotient * divisor < 0).to(tl.int64)


@triton.jit(do_not_specialize=["width"])
def _level_bounds(bounds_ptr, levels_ptr, record_ptr, width, D: tl.constexpr, RULE: tl.constexpr):
    """The record of one level: steps, then (lowest, extent) of every column, each padded to an even
    number of columns."""
    even: tl.constexpr = D + 1 + (D + 1) % 2
    chain = levels_ptr + tl.program_id(0) * width
    record = record_ptr + tl.load(chain) * 2 * even
    n_rules = tl.load(chain + 1)
    step = tl.full((), 1, tl.int64)
    for axis in tl.static_range(D):
        low = tl.load(bounds_ptr + 1 + axis).to(tl.int64)
        high = tl.load(bounds_ptr + D + 2 + axis).to(tl.int64)
        for k in range(n_rules):
            rule = chain + 2 + (k * D + axis) * RULE
            multiplier = tl.load(rule).to(tl.int64)
            divisor = tl.load(rule + 1).to(tl.int64)
            first = -_floored(-(low * multiplier + tl.load(rule + 2)), divisor)
            last = _floored(high * multiplier + tl.load(rule + 3), divisor)
            from_zero = (tl.load(rule + 4) != 0) & (low >= 0)
            first = tl.where(from_zero, tl.maximum(first, 0), first)
            high = tl.where(high < low, first - 1, tl.maximum(last, first - 1))
            low = first
        extent = high - low + 1
        tl.store(record + 1 + axis, step)
        tl.store(record + even + 1 + axis, (low & 0xFFFFFFFF) | (extent << 32))
        step = step * tl.maximum(extent, 1)
    low = tl.load(bounds_ptr).to(tl.int64)
    extent = tl.load(bounds_ptr + D + 1).to(tl.int64) - low + 1
    tl.store(record, step)
    tl.store(record + even, (low & 0xFFFFFFFF) | (extent << 32))


level_bounds_kernel = register(_level_bounds)


def level_bounds(bounds: torch.Tensor, levels: torch.Tensor, record: torch.Tensor, target: Target) -> None:
    """Write the records of these levels in `record`, int64 [n * 2 * even(1 + D)], see
    `core.geometry.boxes.record_of`.

    bounds: int32 [2, 1 + D], lowest and highest coordinate of every column.  levels: see above.
    Bounds must stay within 32 bits.
    """
    dimension, (n_levels, width) = bounds.shape[1] - 1, levels.shape
    level_bounds_kernel.launch(
        bounds.device,
        target,
        (n_levels, 1, 1),
        (bounds, levels, record, width),
        (dimension, RULE),
        {"num_warps": 1},
        (dimension, bounds.data_ptr() % 16, levels.data_ptr() % 16, record.data_ptr() % 16),
    )
