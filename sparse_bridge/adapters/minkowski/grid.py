"""One coordinate map of a manager: coordinates as users see them, and as the core searches them.

Users see absolute coordinates. The core gets them divided by a unit that all are multiples of (as a
rule the tensor stride) and with the spatial axes reversed: MinkowskiEngine's kernels run along axis
1 first, the core's along the last axis, and only so do neighbouring taps meet neighbouring keys.
"""

from __future__ import annotations

import math

import torch

from ...core.geometry.boxes import Box
from ...core.maps.coordinate_map import CoordinateMap
from ...errors import CoordinateError

__all__ = ["Grid", "common_unit", "floor_to"]


def _divided(axes: torch.Tensor, unit: tuple[int, ...]) -> torch.Tensor:
    """floor(axes / unit), integer arithmetic at any magnitude."""
    if all(u == 1 for u in unit):
        return axes
    if len(set(unit)) == 1:
        return torch.div(axes, unit[0], rounding_mode="floor")
    return torch.div(axes, axes.new_tensor(unit), rounding_mode="floor")


def _multiplied(axes: torch.Tensor, unit: tuple[int, ...]) -> torch.Tensor:
    if all(u == 1 for u in unit):
        return axes
    return axes * (unit[0] if len(set(unit)) == 1 else axes.new_tensor(unit))


def floor_to(coords: torch.Tensor, step: tuple[int, ...]) -> torch.Tensor:
    """Integer coordinates [N, 1 + D], axes rounded down to multiples of `step`."""
    axes = _multiplied(_divided(coords[:, 1:], step), step)
    return torch.cat([coords[:, :1], axes], 1)


def common_unit(*units: tuple[int, ...]) -> tuple[int, ...]:
    """Greatest common divisor per axis."""
    return tuple(math.gcd(*axis) for axis in zip(*units, strict=True))


class Grid:
    """Distinct coordinates at one tensor stride.

    coords: int32 [N, 1 + D], batch first, absolute.  stride: [D], the tensor stride.
    unit: [D], at least 1; every coordinate is a multiple of it.
    lo, hi: bounds of every column, inclusive, not always tight.
    made: how it came to be: "inserted", "strided", "expanded", "pruned", "merged" or "origin".
    """

    def __init__(
        self, coords: torch.Tensor, stride: tuple[int, ...], unit: tuple[int, ...],
        lo: tuple[int, ...], hi: tuple[int, ...], made: str,
    ) -> None:  # fmt: skip
        self.coords, self.stride, self.unit, self.made = coords, stride, unit, made
        self.lo, self.hi = lo, hi
        self._views: dict[tuple[int, ...], CoordinateMap] = {}
        self._batches: torch.Tensor | None = None

    @staticmethod
    def of_view(
        view: CoordinateMap, stride: tuple[int, ...], unit: tuple[int, ...], made: str
    ) -> Grid:
        """The grid whose view at `unit` is `view`."""
        coords = view.coords
        axes = _multiplied(coords[:, 1:].flip(1), unit)
        lo, size = view.box.lo, view.box.size
        low = (lo[0], *(c * u for c, u in zip(lo[:0:-1], unit, strict=True)))
        last = [c + s - 1 for c, s in zip(lo[:0:-1], size[:0:-1], strict=True)]
        high = (lo[0] + size[0] - 1, *(c * u for c, u in zip(last, unit, strict=True)))
        grid = Grid(torch.cat([coords[:, :1], axes], 1), stride, unit, low, high, made)
        grid._views[unit] = view
        return grid

    def __getstate__(self) -> tuple[object, ...]:
        return (self.coords, self.stride, self.unit, self.lo, self.hi, self.made)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def n_rows(self) -> int:
        return self.coords.shape[0]

    @property
    def dimension(self) -> int:
        return self.coords.shape[1] - 1

    def box(self, unit: tuple[int, ...]) -> Box:
        """Bounds of the view at `unit`."""
        low = [c // u for c, u in zip(self.lo[1:], unit, strict=True)]
        high = [c // u for c, u in zip(self.hi[1:], unit, strict=True)]
        lo = (self.lo[0], *low[::-1])
        hi = (self.hi[0], *high[::-1])
        return Box.spanning(lo, tuple(max(0, h - c + 1) for c, h in zip(lo, hi, strict=True)))

    def query(self, coords: torch.Tensor, unit: tuple[int, ...]) -> torch.Tensor:
        """Absolute integer coordinates as the view at `unit` wants them."""
        return torch.cat([coords[:, :1], _divided(coords[:, 1:], unit).flip(1)], 1)

    def view(self, unit: tuple[int, ...]) -> CoordinateMap:
        """The coordinates in steps of `unit` (a divisor of the grid's own), axes reversed."""
        found = self._views.get(unit)
        if found is None:
            found = CoordinateMap(self.query(self.coords, unit), self.box(unit))
            found.adopt()  # distinct by construction
            self._views[unit] = found
        return found

    def own_view(self) -> CoordinateMap:
        return self.view(self.unit)

    def coarse_view(self, divisor: tuple[int, ...]) -> CoordinateMap:
        """The own view divided by `divisor` and floored: as many rows, with repeats."""
        own = self.own_view()
        reverse = divisor[::-1]
        axes = _divided(own.coords[:, 1:], reverse)
        box = own.box
        lo = [c // d for c, d in zip(box.lo[1:], reverse, strict=True)]
        last = [c + s - 1 for c, s in zip(box.lo[1:], box.size[1:], strict=True)]
        hi = [c // d for c, d in zip(last, reverse, strict=True)]
        size = [max(0, h - c + 1) for c, h in zip(lo, hi, strict=True)]
        coarse = Box.spanning((box.lo[0], *lo), (box.size[0], *size))
        return CoordinateMap(torch.cat([own.coords[:, :1], axes], 1), coarse)

    def batches(self) -> torch.Tensor:
        """Batch indices present, ascending int64. Raises CoordinateError for a negative one."""
        if self._batches is None:
            found = torch.unique(self.coords[:, 0]).long()
            if found.shape[0] and int(found[0]) < 0:
                raise CoordinateError(
                    f"batch index {int(found[0])}; batch indices must be 0 or more."
                )
            self._batches = found
        return self._batches
