"""Arithmetic of strides: which coordinates a layer of some stride reaches, and what it asks for.

A unit is what all coordinates of a map are multiples of. Offsets and divisors of requests run along
the axes as the core has them, see `grid`.
"""

from __future__ import annotations

import functools
import math

from ...core.geometry.offsets import Offsets
from ...core.geometry.reach import AxisReach, BoxReach
from ...core.maps.request import MapRequest
from ...errors import ContractError, OverflowLimitError

Stride = tuple[int, ...]
LARGEST_STRIDE = (1 << 31) - 1  # coordinates are multiples of it in 32 bits


def common_unit(*units: tuple[int, ...]) -> tuple[int, ...]:
    """Greatest common divisor per axis."""
    return tuple(math.gcd(*axis) for axis in zip(*units, strict=True))


def check_tensor_stride(stride: Stride) -> None:
    """Raises: ContractError for a negative entry, OverflowLimitError beyond 32 bits."""
    if min(stride) < 0:
        raise ContractError(f"tensor stride {list(stride)}; every entry must be 1 or more, or 0 after global pooling.")
    if max(stride) > LARGEST_STRIDE:
        raise OverflowLimitError(
            f"tensor stride {list(stride)}; coordinates of 32 bits take at most {LARGEST_STRIDE}. Use smaller strides."
        )


def product(stride: Stride, factor: Stride) -> Stride:
    """The tensor stride that is `factor` times coarser. Raises: what `check_tensor_stride` does."""
    result = tuple(a * b for a, b in zip(stride, factor, strict=True))
    check_tensor_stride(result)
    return result


def ratio(large: Stride, small: Stride) -> Stride:
    """The quotient per axis, rounded down."""
    return tuple(a // b for a, b in zip(large, small, strict=True))


@functools.cache
def reached(offsets: Offsets, multiplier: tuple[int, ...], divisor: tuple[int, ...]) -> BoxReach:
    """Bounds of the coordinates (c * multiplier + offset) / divisor, where whole, of inputs c: a
    rule of requests."""
    axes = []
    for axis, (m, d) in enumerate(zip(multiplier, divisor, strict=True)):
        along = [offset[axis] for offset in offsets.values]
        axes.append(AxisReach(m, d, min(along), max(along)))
    return BoxReach(tuple(axes))


@functools.cache
def negated(offsets: Offsets) -> Offsets:
    """The offsets the other way, in the same order."""
    return Offsets.of([tuple(-c for c in offset) for offset in offsets.values])


def strided_request(offsets: Offsets, divisor: tuple[int, ...]) -> MapRequest:
    """For the coordinates (c + offset) / divisor: those u that reach a c by u * divisor - offset."""
    rule = reached(offsets, (1,) * len(divisor), divisor)
    return MapRequest("strided", negated(offsets), divisor, rule, "first_seen")
