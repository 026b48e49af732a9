"""Folding rows of equal coordinates onto distinct ones and back: with gradients, no atomics."""

from __future__ import annotations

import dataclasses
import functools

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
