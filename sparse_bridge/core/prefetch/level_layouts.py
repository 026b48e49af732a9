"""Where launches read the bounds of all levels, so that inputs of any shape are served: written by
the host, or by a kernel that knows the bounds of the input's coordinates, or of a level's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ...kernels.runtime.parts import Operand, Part
from ...kernels.runtime.target import Target
from ...kernels.runtime.uploads import uploaded
from ..geometry.boxes import Box, KeyLayout, layout_over, record_of
from ..geometry.constants import constant
from ..geometry.reach import BoxReach
from ..maps.expansion import Source
from .recording import Step, levels_with_unknown_bounds

_FAR = 1 << 24  # coordinates beyond are not served


@dataclasses.dataclass(eq=False)
class Level:
    """Coordinates, whose memory may take more rows than there are: `count` on the device is one
    less than there are (None: all). layout: of the keys of `table`."""

    coords: torch.Tensor
    layout: KeyLayout
    table: Any
    count: Operand | None

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return self.coords.shape[0]

    def source(self) -> Source:
        """What maps over these coordinates start from."""
        return Source(self.coords, self.layout, None, self.count)

    def bounds(self, target: Target) -> torch.Tensor:
        """Queue finding the bounds of the rows in use, int32 [2, 1 + D], see `DataBounds`."""
        from ...kernels.maps.row_bounds import row_bounds

        assert self.count is not None
        return row_bounds(self.coords, self.count, target)


class LevelLayouts:
    """The key layouts of all levels over bounds that stand on the device. Keys of 64 bits serve
    smaller boxes, too."""

    def __init__(self, boxes: dict[int, Box], key64: Collection[int], device: torch.device) -> None:
        """boxes: of the levels of an input like those to come, the input's own first.  key64:
        levels that are to have 64-bit keys, whether these boxes need them or not."""
        size = len(record_of(boxes[0]))
        self.sent = torch.zeros(2 + size * len(boxes), dtype=torch.int64, device=device)
        self.records, self.count = self.sent[2:], Part(self.sent, 0, (1,))
        columns = len(boxes[0].size)
        limits = Box.spanning((-_FAR,) * columns, (2 * _FAR,) * columns)
        self.layouts = {
            level: layout_over(self.sent, 2 + size * index, limits, box.key64 or level in key64, bool(box.steps))
            for index, (level, box) in enumerate(boxes.items())
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
            limits = (*box.lo, *map(sum, zip(box.lo, box.size, strict=True)))
            if max(map(abs, limits)) > _FAR:
                return False
        return True

    def upload(self, boxes: dict[int, Box]) -> None:
        """Queue writing these bounds."""
        values = [number for box in boxes.values() for number in record_of(box)]
        self.records.copy_(uploaded(values, self.records.device))

    def derive(self, bounds: torch.Tensor, steps: Sequence[Step], target: Target, level: int = 0) -> None:
        """Queue writing the bounds of all levels that follow from those of `level`, the input or a
        loose one, see `DataBounds`."""
        from ...kernels.maps.level_bounds import level_bounds

        chains = chains_of(tuple(steps))[level]
        width = 2 + max(map(len, chains.values())) * (bounds.shape[1] - 1) * 5
        indices = {number: index for index, number in enumerate(self.layouts)}
        rules = tuple((indices[number], chain) for number, chain in chains.items())
        level_bounds(bounds, _table(rules, width, bounds.device), self.records, target)


Chain = tuple[BoxReach, ...]


@functools.lru_cache(maxsize=256)
def chains_of(steps: tuple[Step, ...]) -> dict[int, dict[int, Chain]]:
    """By levels whose bounds are measured, the input's own and `levels_with_unknown_bounds`: the levels
    whose bounds follow from them, and the rules that lead there, as far as kernels know their
    arithmetic."""
    measured = {0, *levels_with_unknown_bounds(steps)}
    chains: dict[int, dict[int, Chain]] = {level: {} for level in sorted(measured)}
    chains[0][0] = ()
    start = dict.fromkeys(measured, -1)
    for index, step in enumerate(steps):
        rule = step.request.output
        if step.makes and isinstance(rule, BoxReach) and step.level in start:
            own = step.level in measured
            first = step.level if own else start[step.level]
            chains[first][index + 1] = (*(() if own else chains[first][step.level]), rule)
            start[index + 1] = first
    return chains


@functools.lru_cache(maxsize=256)
def _table(chains: tuple[tuple[int, Chain], ...], width: int, device: torch.device) -> torch.Tensor:
    """What `level_bounds` reads, in rows of `width`."""
    table: list[int] = []
    for index, chain in chains:
        row = [index, len(chain)]
        for rule in chain:
            for axis in rule.axes:
                row += map(int, axis)
        table += [*row, *[0] * (width - len(row))]
    with torch.inference_mode(False):
        return constant(tuple(table), device).view(-1, width)
