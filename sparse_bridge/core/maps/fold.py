"""Folding rows of equal coordinates onto distinct ones and back: with gradients, no atomics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from .segments import SegmentOperator, Segments, multiply, segment_max


@dataclasses.dataclass(eq=False)
class Duplicates:
    """How rows that share a coordinate fold.

    first: int64 [U], the first row of each distinct live coordinate, in the order of
    `CoordinateMap.distinct_map`.  inverse: int64 [N], the distinct coordinate of each row, or U for
    rows that take no part: those outside the box.
    """

    first: torch.Tensor
    inverse: torch.Tensor

    @property
    def n_distinct(self) -> int:
        """U, how many distinct live coordinates there are."""
        return self.first.shape[0]

    @functools.cached_property
    def segments(self) -> Segments:
        """The rows by distinct coordinate."""
        return Segments(self.inverse, self.n_distinct)

    @functools.cached_property
    def shared(self) -> torch.Tensor:
        """int64 [S], the distinct coordinates of more than one row, ascending."""
        return (self.segments.starts.diff() > 1).nonzero().squeeze(1)

    @functools.cached_property
    def firsts(self) -> Duplicates:
        """The folding in which the first of equal rows stands for all; the others take no part."""
        number = torch.arange(self.n_distinct, device=self.inverse.device)
        alone = torch.full_like(self.inverse, self.n_distinct)
        return Duplicates(self.first, alone.index_copy_(0, self.first, number))

    def rows_at(self, sites: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the rows at distinct coordinates int64 [S], ascending at each, how many at each). Waits
        for the device."""
        begins, ends = self.segments.starts[:-1][sites], self.segments.starts[1:][sites]
        counts = (ends - begins).long()
        within = torch.arange(int(counts.sum()), device=sites.device)
        within += (begins - counts.cumsum(0) + counts).repeat_interleave(counts)
        return self.segments.order[within], counts


def sum_rows(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """x [N, C], any float dtype -> [U, C] in that dtype: sums of the rows of each distinct coordinate, taken in fp32
    (fp64 for fp64). Raises: UnsupportedError in transforms of torch.func."""
    return multiply(x, SegmentOperator(fold.segments))


def max_rows(x: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """x [N, C], any float dtype -> [U, C] in that dtype: maxima of the rows of each distinct coordinate. Every row
    that equals its maximum takes the whole gradient, as in local pools. Raises: as `segment_max`."""
    return segment_max(x, fold.segments, ties=True)


def copy_rows(y: torch.Tensor, fold: Duplicates) -> torch.Tensor:
    """y [U, C], any float dtype -> [N, C] in that dtype: every row takes its distinct coordinate's, dead rows zeros.
    Raises: UnsupportedError in transforms of torch.func."""
    return multiply(y, SegmentOperator(fold.segments, gathers=True))


@dataclasses.dataclass(eq=False)
class Backward:
    """Where the gradients of a result's rows go, in maps of rows that share coordinates.

    fold: the equal rows.  distinct: a `Rulebook`, the map among distinct coordinates.  make: makes `rulebook`.
    """

    fold: Duplicates
    distinct: Any
    make: Callable[[], Any]

    @functools.cached_property
    def rulebook(self) -> Any:
        """The map whose side 0 gathers `rows(dy)` for every input row. Waits for the device the first time."""
        return self.make()

    @property
    def backwards(self) -> bool:
        """Whether offsets count from the last one, as where `distinct` is read for gradients."""
        return bool(self.distinct.symmetric)

    def rows(self, dy: torch.Tensor) -> torch.Tensor:
        """dy [N, C] float and, behind it, the sums of its rows at the S coordinates that several share: [N + S, C]
        in dy's dtype. Raises: UnsupportedError in transforms of torch.func."""
        sums = sum_rows(dy, self.fold)
        return torch.cat([dy, sums.index_select(0, self.fold.shared)])
