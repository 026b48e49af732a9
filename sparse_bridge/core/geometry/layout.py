"""Where kernels read how coordinates become keys.

Bounds are values on the device and no part of a kernel, so that scenes of any shape run the same
launches. All boxes of a scene travel together, and nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels.runtime.parts import Part
from ...kernels.runtime.target import current_stream
from ...kernels.runtime.uploads import uploaded

if TYPE_CHECKING:
    from .boxes import Box
    from .offsets import Offsets


class KeyLayout(NamedTuple):
    """The keys of coordinates.

    limits: a box that holds them all, as far as the host knows.  key64: width of the keys.
    bounds: int32 [1 + D, 2] on the device, (lo, size) per column.  steps: int64 [1 + D] on the
    device, see `Box.steps`; None where there are none.
    """

    limits: Box
    key64: bool
    bounds: Part
    steps: Part | None

    def wide(self, offsets: Offsets, multiplier: tuple[int, ...]) -> bool:
        """Whether coordinate * multiplier + offset can leave 32 bits."""
        return self.limits.wide(offsets, multiplier)


def record_of(box: Box) -> list[int]:
    """What the device has to know of a box: steps and then bounds, each starting at a multiple of
    16 bytes, as int64 (bounds two to one)."""
    even = [0] * (len(box.size) % 2)
    steps = box.steps or (0,) * len(box.size)
    bounds = [low & 0xFFFFFFFF | size << 32 for low, size in zip(box.lo, box.size, strict=True)]
    return [*steps, *even, *bounds, *even]


def layout_over(
    records: torch.Tensor, start: int, limits: Box, key64: bool, sortable: bool
) -> KeyLayout:
    """The layout that reads the record from `start` of `records` on, int64 on the device, see
    `record_of`."""
    columns = len(limits.size)
    bounds = Part(records, start + columns + columns % 2, (columns, 2))
    steps = Part(records, start, (columns,), torch.int64) if sortable else None
    return KeyLayout(limits, key64, bounds, steps)


def laid_out(boxes: Sequence[Box], device: torch.device) -> list[KeyLayout]:
    """The layouts of these boxes, for work on the current stream; new ones are sent in one copy."""
    key = device, current_stream(device)
    new = list(dict.fromkeys(box for box in boxes if key not in box.layouts))
    if new:
        values, starts = list[int](), list[int]()
        for box in new:
            starts.append(len(values))
            values += record_of(box)
        sent = uploaded(values, device)
        for box, start in zip(new, starts, strict=True):
            box.layouts[key] = layout_over(sent, start, box, box.key64, bool(box.steps))
    return [box.layouts[key] for box in boxes]


_constants: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """These few numbers on `device`, int32; sent once, and not to be changed."""
    found = _constants.get((values, device))
    if found is None:
        with torch.inference_mode(False):
            found = torch.tensor(values, dtype=torch.int32, device=device)
        _constants[values, device] = found
    return found


def constants() -> list[torch.Tensor]:
    """All of them. Graphs may read them: they stay."""
    return list(_constants.values())
