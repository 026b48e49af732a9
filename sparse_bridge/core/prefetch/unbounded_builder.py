"""All maps of an input whose bounds nobody has seen yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.runtime.target import Target
from ..maps.coordinate_map import CoordinateMap
from .batched_builder import BatchedBuilder
from .level_layouts import LevelLayouts
from .recording import Recording, Step, boxes_of
from .traces import Traces


class UnboundedBuilder(BatchedBuilder):
    """All maps of an input whose bounds the host has not seen: it learns them with the sizes of the
    levels.

    outgrown: the bounds turned out to be none that the launches could take.
    """

    def __init__(
        self,
        cmap: CoordinateMap,
        target: Target,
        steps: tuple[Step, ...],
        last: Recording,
        key64: set[int],
        traces: Traces | None = None,
    ) -> None:
        """key64: levels that needed 64-bit keys so far; those of this input are added."""
        assert cmap.data_bounds is not None and last.box is not None
        guess = boxes_of(last.box, steps)
        self.data_bounds, self.key64, self.outgrown = cmap.data_bounds, key64, False
        self.guessed = LevelLayouts(guess, key64, cmap.device)
        super().__init__(cmap, target, steps, last, where=self.guessed, boxes=guess, traces=traces)

    def lay_levels_out(self) -> None:
        self.guessed.derive(self.data_bounds.bounds, self.steps, self.target)

    def extra_readbacks(self) -> list[torch.Tensor]:
        return [*super().extra_readbacks(), self.data_bounds.bounds.flatten()]

    def sizes(self, capacities: dict[int, int], read: list[list[int]], lengths: Sequence[int]) -> dict[int, int] | None:
        *read, bounds = read
        boxes = boxes_of(self.data_bounds.learn(bounds), self.steps)
        self.key64 |= {level for level, box in boxes.items() if box.key64}
        self.outgrown = not self.guessed.serves(boxes)
        if self.outgrown:
            self.cmap.drop_table()
            return None
        return super().sizes(capacities, read, lengths)
