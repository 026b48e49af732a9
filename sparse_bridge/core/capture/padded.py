"""Padded inputs: how many rows there are stands on the device alone.

A captured graph of launches repeats addresses and sizes, but inputs differ in rows. So an input
lies in memory for more rows than it has, all its maps are built by a `PaddedBuilder`, which leaves
them that large, and kernels read the number of rows of every level from the device. What lies
behind the last row is never gathered by a convolution; NaN there shows whatever else mixes rows.
Training asks for more: sums over rows are right where what lies behind is finite in features and
zero in their gradients. Maps that earlier inputs were not asked for are not available.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.runtime.parts import octave_step
from ...refusals import Refusal, Why
from ..maps import rows as row_scopes
from ..maps.rows import Rows
from ..prefetch.batched_builder import level_rows

if TYPE_CHECKING:
    from ..maps.pair_lists import DevicePairs
    from ..prefetch.recording import Recording

__all__ = ["GRID", "PaddedInput", "capacity_of", "compare", "current", "using"]


GRID = -1  # in the place of a level: all of a tensor counts
_STEPS_PER_OCTAVE = 2
_LEAST = 2048


@dataclasses.dataclass(eq=False)
class PaddedInput:
    """coords: int32 [capacity, 1 + D], zeros behind the last row.  count: int32 [1], one less than
    the rows there are.  recording: the requests over inputs of this grid.  padding_value: what layers
    leave behind the last row of a result; None: anything.

    Once the maps are built: capacities, rows that each level has memory for, by level; counts, by
    level like `count`; counters and flags, to be read and `validated`.  prepared: the maps: sides
    of every step and coordinates by level; pairs: the pair lists that are among them, by step.
    grids: batch sizes of the dense grids that were made.
    estimates: of the rows of every level, once an input has been looked at.
    items: batch items, where every input has so many.
    """

    coords: torch.Tensor
    count: torch.Tensor
    recording: Recording
    padding_value: float | None = None
    capacities: dict[int, int] = dataclasses.field(default_factory=dict)
    counts: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    counters: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()  # of the counters of every level
    flags: torch.Tensor | None = None
    prepared: tuple[list[Any], dict[int, torch.Tensor]] | None = None
    pairs: dict[int, DevicePairs] = dataclasses.field(default_factory=dict)
    grids: set[int] = dataclasses.field(default_factory=set)
    estimates: dict[int, int] = dataclasses.field(default_factory=dict)
    items: int | None = None

    def rows(self, level: int) -> Rows:
        """The rows of a level, once the maps are built."""
        estimate = self.estimates.get(level, 0)
        return Rows(None, self.counts[level], self.capacities[level], self.padding_value, estimate)

    def tensors(self) -> list[torch.Tensor]:
        """What the maps consist of, once they are built, and numbers that kernels read."""
        assert self.prepared is not None
        sides, coords = self.prepared
        parts = [part for pair in sides for side in pair if side is not None for part in side.parts]
        parts += [part for pairs in self.pairs.values() for part in pairs.parts]
        counts = [self.count, *self.counts.values()]
        return [self.coords, *counts, *coords.values(), *parts]

    def level_of(self, value: torch.Tensor) -> int:
        """The level whose rows `value` has, capacity included; GRID for a dense grid, or what was
        computed of one. Raises Refusal."""
        if value.ndim > 1 and value.shape[0] in self.grids:
            return GRID
        for level, capacity in self.capacities.items():
            if value.ndim and value.shape[0] == capacity:
                return level
        raise Refusal(Why.GRAPH_NO_LEVEL, list(value.shape))

    def used(self, value: torch.Tensor, rows: dict[int, int]) -> int:
        """How many rows of a tensor are in use. Raises Refusal."""
        level = self.level_of(value)
        return len(value) if level == GRID else rows[level]

    def validated(self, counters: Sequence[int], flags: Sequence[int], n_rows: int) -> dict[int, int] | None:
        """Rows of every level, from the values of `counters` and `flags` once the kernels have run;
        None where rows are equal, lie outside, or do not fit."""
        from ...kernels.maps.hash_table import live_flags

        inserted, seen, overflow = live_flags(flags)
        if overflow or not inserted == seen == n_rows:
            return None
        deeper = {level: capacity for level, capacity in self.capacities.items() if level}
        rows = level_rows(counters, self.lengths, deeper)
        return None if rows is None else {0: n_rows, **rows}


_local = threading.local()


@contextmanager
def using(padded_input: PaddedInput) -> Iterator[None]:
    """Layers of this thread, when they are given the coordinates of this input, take its maps."""
    outer = getattr(_local, "padded_input", None)
    _local.padded_input = padded_input
    levels = sorted(padded_input.capacities, reverse=True)  # of equal capacities the input's own counts
    try:
        counts = {padded_input.capacities[level]: padded_input.rows(level) for level in levels}
        with row_scopes.scope(counts, padded_input.grids, padded_input.items):
            yield
    finally:
        _local.padded_input = outer


def current() -> PaddedInput | None:
    """The padded input of this thread."""
    return getattr(_local, "padded_input", None)


def capacity_of(rows: int) -> int:
    """Rows to reserve for an input: two sizes an octave, as a larger one costs another capture."""
    step = max(_LEAST, octave_step(rows, _STEPS_PER_OCTAVE))
    return -(-rows // step) * step


def compare(name: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    """Raise Refusal unless a tensor that a model makes of an input, `expected`, and the one of the
    same input with NaN behind its last row have the same bits; undecided where NaN that is there
    anyway would hide one from behind the last row."""
    own = f"{name}, {_described(expected)},"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        raise Refusal(Why.GRAPH_OUTPUT_SHAPE, own, _described(actual))
    differ = expected != actual
    if not expected.is_floating_point():
        if differ.any():
            raise Refusal(Why.GRAPH_OUTPUT_ROWS, own, _rows(differ))
        return
    if expected.isnan().any():
        most = torch.finfo(expected.dtype).max
        raise Refusal(Why.GRAPH_NAN, own, _rows(expected.isnan()), expected.dtype, most)
    if actual.isnan().any():
        raise Refusal(Why.GRAPH_MIXED_ROWS, own, _rows(actual.isnan()))
    if differ.any():
        size = torch.where(expected.isfinite(), expected, 0.0).double().norm()
        error = torch.where(differ, expected.double() - actual.double(), 0.0).norm()
        raise Refusal(Why.GRAPH_OTHER_BITS, own, float(error / size), _rows(differ))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _rows(marked: torch.Tensor) -> int:
    """Rows with a mark."""
    return int(marked.reshape(len(marked), -1).any(1).sum())
