"""Builds the maps of a padded input, and gives them to the layers that are called with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.runtime.parts import viewed
from ...kernels.runtime.target import Target
from ..maps.coordinate_map import CoordinateMap
from ..maps.rows import Rows
from ..maps.rulebook import Rulebook
from ..prefetch import prefetch
from ..prefetch.batched_builder import BatchedBuilder
from ..prefetch.level_layouts import LevelLayouts
from ..prefetch.recording import BuiltSteps, Step
from . import padded
from .padded import PaddedInput

_SLACK = 1.25  # capacity of the levels over the estimate


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

    def row_counts(self, rows: dict[int, int]) -> dict[int, Rows]:
        return {level: self.padded_input.rows(level) for level in rows}

    def give_pairs(self, rulebooks: list[Rulebook]) -> None:
        for index, pairs in self.padded_input.pairs.items():
            rulebooks[index].pairs_are(pairs)

    def new_coordinates(self, level: int, coords: torch.Tensor, rows: Rows) -> CoordinateMap:
        new = CoordinateMap(coords[: rows.capacity], self.boxes[level], rows, own=True)
        new.adopt()
        new.tight = new.box
        return new


class _Prepared(NamedTuple):
    """The maps of the padded input of this thread."""

    padded_input: PaddedInput

    @property
    def steps(self) -> Sequence[Step]:
        return self.padded_input.recording.steps

    def built_steps(self, cmap: CoordinateMap) -> BuiltSteps:
        padded_input, target = self.padded_input, cmap.kernel_target()
        elsewhere = cmap.coords.data_ptr() != padded_input.coords.data_ptr()
        if target is None or elsewhere or padded_input.prepared is None:
            return {}
        cmap.adopt()
        sides, coords = padded_input.prepared
        builder = PaddedBuilder(padded_input, cmap, target, tuple(self.steps))
        return builder.assembled(sides, padded_input.capacities, coords)


def _prepared_maps() -> _Prepared | None:
    padded_input = padded.current()
    return None if padded_input is None else _Prepared(padded_input)


prefetch.prepared_maps = _prepared_maps
