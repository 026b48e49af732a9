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

from ...kernels.runtime.parts import octave_step, viewed
from ...kernels.runtime.target import Target
from ...refusals import Refusal, Why
from ..maps import rows as row_scopes
from ..maps.coordinate_map import CoordinateMap
from ..maps.pair_groups import count_pairs
from ..maps.rows import Rows
from ..maps.rulebook import Rulebook
from ..prefetch import prefetch
from ..prefetch.batched_builder import BatchedBuilder, level_rows
from ..prefetch.level_layouts import LevelLayouts
from ..prefetch.recording import INPUT, BuiltSteps, Recording, Step

if TYPE_CHECKING:
    from ...kernels.maps.pair_batch import PairBatch

GRID = -1  # in the place of a level: all of a tensor counts
_STEPS_PER_OCTAVE = 2
_LEAST = 2048
_SPARE, _STEP = 256, 128  # rows of a level besides; what its capacity is a multiple of
_SLACK = 1.25  # capacity of a level over the estimate from the rows of inputs
_SLACK_OF_MOST = 1.125  # and over the most rows that it had


@dataclasses.dataclass(eq=False)
class PaddedInput:
    """coords: int32 [capacity, 1 + D], of any site behind the last row.  count: int32 [1], one less than
    the rows there are.  recording: the requests over inputs of this grid.  padding_value: what layers
    leave behind the last row of a result; None: anything.

    Once the maps are built: capacities, rows that each level has memory for, by level; counts, by
    level like `count`; counters and flags, to be read and `validated`.  prepared: the maps: sides
    of every step and coordinates by level; pairs: where their pairs are counted.
    grids: batch sizes of the dense grids that were made.
    estimates: of the rows of every level, once an input has been looked at.
    refusal: why no graph can serve the last input, whatever its capacity.
    batch: the lowest batch index, and how many there are.  pools: rows of tensors that have one per batch item, if
    layers made any.
    items: batch items, where every input has so many.  looks: at what layers were given in a trial, see `look_for_nan`.
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
    pairs: PairBatch | None = None
    grids: set[int] = dataclasses.field(default_factory=set)
    estimates: dict[int, int] = dataclasses.field(default_factory=dict)
    refusal: Why | None = None
    batch: tuple[int, int] = (0, 0)
    pools: set[int] = dataclasses.field(default_factory=set)
    items: int | None = None
    looks: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> Sequence[Step]:
        """All requests over inputs of this grid."""
        return self.recording.steps

    def built_steps(self, cmap: CoordinateMap) -> BuiltSteps:
        """The maps, for the layers that are called with it; none where `cmap` is not its coordinates."""
        target = cmap.kernel_target()
        elsewhere = cmap.coords.data_ptr() != self.coords.data_ptr()
        if target is None or elsewhere or self.prepared is None:
            return {}
        cmap.adopt()
        sides, coords = self.prepared
        # Masks that a layer makes of a table stay with its copy: a graph has to make them of every input anew.
        sides = [tuple(side if side is None or side.tiled else side.copy() for side in pair) for pair in sides]
        return PaddedBuilder(self, cmap, target, tuple(self.steps)).assembled(sides, self.capacities, coords)

    def rows(self, level: int) -> Rows:
        """The rows of a level, once the maps are built."""
        estimate = self.estimates.get(level, 0)
        return Rows(None, self.counts[level], self.capacities[level], self.padding_value, estimate)

    def tensors(self) -> list[torch.Tensor]:
        """What the maps consist of, once they are built, and numbers that kernels read."""
        assert self.prepared is not None
        sides, coords = self.prepared
        parts = [part for pair in sides for side in pair if side is not None for part in side.parts]
        parts += [] if self.pairs is None else [self.pairs.numbers]
        counts = [self.count, *self.counts.values()]
        return [self.coords, *counts, *coords.values(), *parts]

    def level_of(self, value: torch.Tensor) -> int:
        """The level whose rows `value` has, capacity included; GRID for a dense grid, a row per batch item, or what
        was computed of those. Raises Refusal."""
        if (value.ndim > 1 and value.shape[0] in self.grids) or (value.ndim and value.shape[0] in self.pools):
            return GRID
        for level, capacity in self.capacities.items():
            if value.ndim and value.shape[0] == capacity:
                return level
        raise Refusal(Why.GRAPH_NO_LEVEL, list(value.shape))

    def used(self, value: torch.Tensor, rows: dict[int, int]) -> int:
        """How many rows of a tensor are in use. Raises Refusal."""
        level = self.level_of(value)
        return len(value) if level == GRID else rows[level]

    def batch_of_input(self, n_items: int) -> tuple[int, int]:
        """`batch`, for layers that make tensors of `n_items` rows by it. Raises Refusal."""
        rows = n_items or self.batch[1]
        if rows in self.capacities.values():  # nothing would tell such a tensor from one of a level
            raise Refusal(Why.GRAPH_NO_LEVEL, [rows])
        self.pools.add(rows)
        return self.batch

    def refuse_mixed(self) -> None:
        """Raise Refusal where a layer was given NaN from behind the last row, which outputs need not show: a strided
        layer may leave the cell out."""
        looks, self.looks = self.looks, []
        if n_mixed := int(torch.stack(looks).sum()) if looks else 0:
            raise Refusal(Why.GRAPH_MIXED_ROWS, f"what {n_mixed} of its layers are given", "some")

    def validated(self, counters: Sequence[int], flags: Sequence[int], n_rows: int) -> dict[int, int] | None:
        """Rows of every level, from the values of `counters` and `flags` once the kernels have run;
        None where rows are equal, lie outside, or do not fit."""
        from ...kernels.maps.hash_table import live_flags

        inserted, seen, overflow = live_flags(flags)
        regular = inserted == seen == n_rows
        self.refusal = None if overflow or regular else Why.GRAPH_DUPLICATES
        if overflow or not regular:
            return None
        deeper = {level: capacity for level, capacity in self.capacities.items() if level}
        rows = level_rows(counters, self.lengths, deeper)
        return None if rows is None else {0: n_rows, **rows}


class PaddedBuilder(BatchedBuilder):
    """The maps of a padded input, for the capacity of every level."""

    def __init__(
        self,
        padded_input: PaddedInput,
        cmap: CoordinateMap,
        target: Target,
        steps: tuple[Step, ...],
        where: LevelLayouts | None = None,
    ) -> None:
        """cmap: coordinates of the input.  where: layouts of levels that are not those of their boxes."""
        super().__init__(cmap, target, steps, padded_input.recording, _SLACK, where)
        self.padded_input = padded_input

    def lay_out(self) -> bool:
        """Queue the coordinates of all levels of the padded input, which learns where its counters
        are; False where the last input does not tell how large they get. Capacities tell the level.
        """
        if (capacities := self.reserved_capacities()) is None:
            return False
        taken = {self.cmap.n_rows}
        for index in capacities:
            while capacities[index] in taken:
                capacities[index] += 8
            taken.add(capacities[index])
        self.lay_levels_out()
        padded_input = self.padded_input
        padded_input.counters, root = self.expanded(capacities)
        padded_input.lengths, padded_input.flags = tuple(self.counter_lengths()), root.flags
        rooms = {index + 1: capacity for index, capacity in capacities.items()}
        padded_input.capacities = {0: self.cmap.n_rows, **rooms}
        counts = {number: level.count for number, level in self.levels.items()}
        padded_input.counts = {at: padded_input.count if n is None else viewed(n) for at, n in counts.items()}
        return True

    def room_of_step(self, index: int, estimate: float) -> int:
        """No more than what the largest inputs made. Small ones make more rows of a row, and estimates for a large
        capacity from theirs would take twice the memory."""
        largest = max(1.0, self.cmap.n_rows / self.last.most_rows(INPUT)) * self.last.most_rows(index)
        rows = int(min(estimate, _SLACK_OF_MOST * largest)) + _SPARE
        return -(-rows // _STEP) * _STEP

    def row_counts(self, rows: dict[int, int]) -> dict[int, Rows]:
        return {level: self.padded_input.rows(level) for level in rows}

    def count_pairs(self, sides: list[Any]) -> None:
        """Queue counting the pairs of the maps that have these sides."""
        padded_input = self.padded_input
        padded_input.pairs = None
        built = self.assembled(sides, padded_input.capacities, self.coords())
        listed = self.listed([built[step].kmap.rulebook for step in self.steps])
        padded_input.pairs = count_pairs(listed, self.target, captured=True)

    def give_pairs(self, rulebooks: list[Rulebook]) -> None:
        counted = self.padded_input.pairs
        if counted is not None:
            count_pairs(self.listed(rulebooks), self.target, captured=True, counted=counted)

    def new_coordinates(self, level: int, coords: torch.Tensor, rows: Rows) -> CoordinateMap:
        new = CoordinateMap(coords[: rows.capacity], self.boxes[level], rows, own=True)
        new.adopt()
        new.tight = new.box
        return new


TRIAL_FILL = 3.0  # behind the last row, see `fill_behind`: finite, and not what features are there
LARGE_FILL = 3000.0  # the same in inference, for programs that count what is large; fp16 has it
_local = threading.local()


@contextmanager
def using(padded_input: PaddedInput) -> Iterator[None]:
    """Layers of this thread, when they are given the coordinates of this input, take its maps."""
    outer = getattr(_local, "padded_input", None)
    _local.padded_input = padded_input
    levels = sorted(padded_input.capacities, reverse=True)  # of equal capacities the input's own counts
    try:
        counts = {padded_input.capacities[level]: padded_input.rows(level) for level in levels}
        batch = padded_input.batch_of_input if padded_input.items is None else None
        with row_scopes.scope(counts, padded_input.grids, padded_input.items, padded_input.looks, batch):
            yield
    finally:
        _local.padded_input = outer


def current() -> PaddedInput | None:
    """The padded input of this thread."""
    return getattr(_local, "padded_input", None)


prefetch.prepared_maps = current


def capacity_of(rows: int) -> int:
    """Rows to reserve for an input: two sizes an octave, as a larger one costs another capture."""
    step = max(_LEAST, octave_step(rows, _STEPS_PER_OCTAVE))
    return -(-rows // step) * step
