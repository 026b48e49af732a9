"""All maps of an input whose bounds nobody has seen yet."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.runtime.target import Target
from ..maps.coordinate_map import CoordinateMap
from .batched_builder import BatchedBuilder
from .history import RequestHistory, Step, boxes_of
from .level_layouts import LevelLayouts


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
        self.given = LevelLayouts(guess, key64, cmap.device)
        super().__init__(cmap, target, steps, last, where=self.given, boxes=guess)

    def _expanded(self, capacities: dict[int, int]) -> tuple[torch.Tensor, Any]:
        self.given.derive(self.bounds.ends, self.steps, self.target)
        return super()._expanded(capacities)

    def _besides(self) -> list[torch.Tensor]:
        return [*super()._besides(), self.bounds.ends.flatten()]

    def _sizes(self, capacities: dict[int, int], read: list[list[int]]) -> dict[int, int] | None:
        *read, ends = read
        boxes = boxes_of(self.bounds.learn(ends), self.steps)
        self.key64 |= {level for level, box in boxes.items() if box.key64}
        self.outgrown = not self.given.serves(boxes)
        if self.outgrown:
            self.cmap.drop_table()
            return None
        return super()._sizes(capacities, read)
