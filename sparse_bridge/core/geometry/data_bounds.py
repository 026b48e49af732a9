"""Bounds of coordinates that come without: a look at the data, which the host need not wait for
before it goes on."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from .boxes import Box


def box_of(bounds: Sequence[int]) -> Box:
    """The box between the lowest values of all columns and the highest, one after another."""
    columns = len(bounds) // 2
    low, high = bounds[:columns], bounds[columns:]
    return Box.spanning(tuple(low), tuple(h - lo + 1 for lo, h in zip(low, high, strict=True)))


class DataBounds:
    """The exact bounds of coordinates int32 [N, 1 + D], N > 0."""

    def __init__(self, coords: torch.Tensor) -> None:
        self.coords = coords
        self.cached_box: Box | None = None

    @property
    def dimension(self) -> int:
        """Spatial axes, D."""
        return self.coords.shape[1] - 1

    @functools.cached_property
    def bounds(self) -> torch.Tensor:
        """int32 [2, 1 + D] on the device: the lowest and the highest of every column."""
        bounds = self.coords.new_empty((2, self.coords.shape[1]))
        self.find(bounds)
        return bounds

    def find(self, bounds: torch.Tensor) -> None:
        """Write the lowest and the highest of every column there: int32 [2, 1 + D] on the coordinates' device."""
        torch.aminmax(self.coords, dim=0, out=(bounds[0], bounds[1]))

    def learn(self, bounds: Sequence[int]) -> Box:
        """The box, from the values of `bounds`, one row after another."""
        if self.cached_box is None:
            self.cached_box = box_of(bounds)
        return self.cached_box

    @property
    def box(self) -> Box:
        """The box that they span; waits for the device the first time."""
        return self.learn(self.bounds.flatten().tolist()) if self.cached_box is None else self.cached_box


class Root(NamedTuple):
    """Coordinates of an input, int32 [N, 1 + D], batch first, axes in the order of the core, and
    where they lie; exact bounds may still have to be learnt.

    known: names of the other levels that the framework keeps with the input, which layers in front of it made.
    distinct: whether it is known that no two rows are equal, and that all lie inside.
    limit: a box that they lie in, if one is known; enough for layers that make no level.
    exact: their exact bounds, where `bounds` is that limit."""

    coords: torch.Tensor
    bounds: Box | DataBounds
    known: frozenset[Hashable] = frozenset()
    distinct: bool = False
    limit: Box | None = None
    exact: Box | DataBounds | None = None

    @property
    def box(self) -> Box:
        """Waits for the device the first time, if it is still to be learnt."""
        return self.bounds.box if isinstance(self.bounds, DataBounds) else self.bounds

    def ends(self, columns: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """The lowest values and the extents of these columns of the box, but for numbers below 0. Waits as `box`."""
        return tuple((self.box.lo[column], self.box.size[column]) for column in sorted(columns) if column >= 0)

    @property
    def bounds_known(self) -> bool:
        """Whether nobody has to wait for the box."""
        return not isinstance(self.bounds, DataBounds) or self.bounds.cached_box is not None

    def for_steps(self, make_levels: bool) -> Root:
        """The same for layers that make levels or do not: those need not wait for exact bounds."""
        if make_levels and self.exact is not None:
            return self._replace(bounds=self.exact, exact=None)
        if not make_levels and self.exact is None and self.limit is not None:
            return self._replace(bounds=self.limit, exact=self.bounds)
        return self
