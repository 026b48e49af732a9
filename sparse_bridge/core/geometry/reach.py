"""Where output coordinates lie, as arithmetic on bounds: by the host, or by kernels for bounds that
only the device knows."""

from __future__ import annotations

from typing import NamedTuple

from .boxes import Box


class AxisReach(NamedTuple):
    """Bounds along an axis: from ceil((low * multiplier + first) / divisor) to floor((high *
    multiplier + last) / divisor); from_zero: not below 0 where low is not."""

    multiplier: int
    divisor: int
    first: int
    last: int
    from_zero: bool = False

    def bounds(self, low: int, high: int) -> tuple[int, int]:
        """(lowest, highest) of what inputs in low .. high reach; high is one less than low where
        there is nothing."""
        first = -(-(low * self.multiplier + self.first) // self.divisor)
        if self.from_zero and low >= 0:
            first = max(first, 0)
        last = (high * self.multiplier + self.last) // self.divisor
        return first, first - 1 if high < low else max(last, first - 1)


class BoxReach(NamedTuple):
    """A rule of requests, see `core.maps.request`: one `AxisReach` per axis; batch items stay.

    loose: coordinates may end inside of the output box, and rules over them start from where they
    do.  nonnegative: it is the rule of coordinates from 0 on alone.
    """

    axes: tuple[AxisReach, ...]
    loose: bool = False
    nonnegative: bool = False

    def output_box(self, box: Box) -> Box:
        """Bounds of the places that coordinates in `box` reach."""
        lo, size = [box.lo[0]], [box.size[0]]
        for axis, low, extent in zip(self.axes, box.lo[1:], box.size[1:], strict=True):
            first, last = axis.bounds(low, low + extent - 1)
            lo.append(first)
            size.append(last - first + 1)
        return Box.spanning(tuple(lo), tuple(size))
