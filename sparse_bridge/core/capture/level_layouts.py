"""Where launches read the bounds of all levels, so that inputs of any shape are served: written by
the host, or by a kernel that knows the bounds of the input's coordinates."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ...kernels.runtime.target import Target
from ..geometry.boxes import Box
from ..geometry.layout import constant, layout_over, record_of
from ..geometry.reach import BoxReach
from ..maps.coordinate_map import CoordinateMap
from .batched_builder import Answers, BatchedBuilder, Sides
from .history import RequestHistory, Step, boxes_of

_FAR = 1 << 24  # coordinates beyond are not served


class LevelLayouts:
    """The key layouts of all levels over bounds that stand on the device. Keys of 64 bits serve
    smaller boxes, too."""

    def __init__(self, boxes: dict[int, Box], key64: Collection[int], device: torch.device) -> None:
        """boxes: of the levels of an input like those to come, the input's own first.  key64:
        levels that are to have 64-bit keys, whether these boxes need them or not."""
        sizes = [len(record_of(box)) for box in boxes.values()]
        self.sent = torch.zeros(2 + sum(sizes), dtype=torch.int64, device=device)
        first, self.records = self.sent.split([2, sum(sizes)])
        self.count = first.view(torch.int32)[:1]
        columns = len(boxes[0].size)
        limits = Box.spanning((-_FAR,) * columns, (2 * _FAR,) * columns)
        self.layouts = {
            level: layout_over(part, limits, box.key64 or level in key64, bool(box.steps))
            for part, (level, box) in zip(self.records.split(sizes), boxes.items(), strict=True)
        }

    def serves(self, boxes: dict[int, Box]) -> bool:
        """Whether these are bounds that the launches can take."""
        if boxes.keys() != self.layouts.keys():
            return False
        for level, box in boxes.items():
            layout = self.layouts[level]
            if box.oversized or (box.key64 and not layout.key64):
                return False
            if layout.steps is not None and not box.steps:
                return False
            ends = (*box.lo, *map(sum, zip(box.lo, box.size, strict=True)))
            if max(map(abs, ends)) > _FAR:
                return False
        return True

    def derive(self, ends: torch.Tensor, steps: Sequence[Step], target: Target) -> None:
        """Queue writing the bounds of all levels, from those of the input, see `DataBounds`."""
        from ...kernels.maps.level_bounds import level_bounds

        chains = chains_of(tuple(steps))
        assert chains is not None
        width = 1 + max(len(chain) for chain in chains) * (ends.shape[1] - 1) * 5
        levels = constant(_table(chains, width), ends.device).view(-1, width)
        level_bounds(ends, levels, self.records, target)


@functools.lru_cache(maxsize=256)
def chains_of(steps: tuple[Step, ...]) -> tuple[tuple[BoxReach, ...], ...] | None:
    """Of every level that `boxes_of` knows, the rules that lead there from the input; None where
    one is not arithmetic that kernels know."""
    chains: dict[int, tuple[BoxReach, ...]] = {0: ()}
    for place, step in enumerate(steps):
        if step.makes:
            rule = step.request.output
            if not isinstance(rule, BoxReach) or step.level not in chains:
                return None
            chains[place + 1] = (*chains[step.level], rule)
    return tuple(chains.values())


@functools.lru_cache(maxsize=256)
def _table(chains: tuple[tuple[BoxReach, ...], ...], width: int) -> tuple[int, ...]:
    """What `level_bounds` reads, in rows of `width`."""
    table: list[int] = []
    for chain in chains:
        row = [len(chain)]
        for rule in chain:
            for axis in rule.axes:
                row += map(int, axis)
        table += [*row, *[0] * (width - len(row))]
    return tuple(table)


class UnboundedBuilder(BatchedBuilder):
    """All maps of an input whose bounds the host has not seen: it learns them with the sizes of the
    levels.

    outgrown: the bounds turned out to be none that the launches could take.
    """

    def __init__(
        self, cmap: CoordinateMap, target: Target, steps: tuple[Step, ...], last: RequestHistory,
        key64: set[int],
    ) -> None:  # fmt: skip
        """key64: levels that needed 64-bit keys so far; those of this input are added."""
        assert cmap.data_bounds is not None and last.box is not None
        guess = boxes_of(last.box, steps)
        self.bounds, self.key64, self.outgrown = cmap.data_bounds, key64, False
        self.where = LevelLayouts(guess, key64, cmap.device)
        super().__init__(cmap, target, steps, last, layouts=self.where.layouts, boxes=guess)

    def _expanded(self, capacities: dict[int, int]) -> tuple[torch.Tensor, Any]:
        self.where.derive(self.bounds.ends, self.steps, self.target)
        return super()._expanded(capacities)

    def _besides(self) -> list[torch.Tensor]:
        return [*super()._besides(), self.bounds.ends.flatten()]

    def _finish(
        self, made: list[Sides], capacities: dict[int, int], read: list[list[int]]
    ) -> Answers | None:
        *read, ends = read
        self.boxes = boxes_of(self.bounds.learn(ends), self.steps)
        self.key64 |= {level for level, box in self.boxes.items() if box.key64}
        self.outgrown = not self.where.serves(self.boxes)
        if self.outgrown:
            self.cmap.drop_table()
            return None
        return super()._finish(made, capacities, read)
