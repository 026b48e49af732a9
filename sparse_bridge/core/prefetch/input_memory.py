"""Memory that the launches of an input share while its maps are queued, and that is freed when the
maps are tiles: a few large allocations cost the host less than one for every map."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import torch

from ...kernels.runtime.parts import Slab, octave_step
from ..device.kernels import neighbor_table
from ..geometry.host_moves import Rule
from ..maps.expansion import scratch_elements
from ..maps.request import MapRequest
from .recording import Recording, Step

_BLANK = -1  # what tables hold before anything is scattered to them
# Elements of tables that become tiles side by side, 96 MiB: a table goes when its tiles are there,
# and every batch more takes the host some ten launches. SECOND at 93k rows then takes one batch.
BATCH = 24 << 20


@functools.lru_cache(maxsize=1024)
def rule_of(request: MapRequest) -> Rule:
    """By which a request makes coordinates."""
    stride = request.stride
    unit = (1,) * len(stride)
    return Rule(unit, stride, -1) if request.map_type == "strided" else Rule(stride, unit, 1)


def room_for(rows: int) -> int:
    """Up to one of eight sizes per octave, so that the allocator meets few."""
    step = max(128, octave_step(rows, 8))
    return -(-rows // step) * step


# Of a step: for its table, if it is looked up, and for its two tables, if they are scattered to. None where there is
# none: tables take memory of their own.
Slabs = tuple[Slab | None, tuple[Slab | None, Slab | None]]
NO_SLABS: Slabs = None, (None, None)


class InputMemory:
    """The views of its maps that an input needs, as the last one did, and which of them may share
    memory.

    sharing: whether any do.
    """

    def __init__(self, steps: Sequence[Step], last: Recording, device: torch.device) -> None:
        self._steps, self._last, self._device = steps, last, device
        self.sharing = False
        self._geometries = {
            index: step.request.offsets.geometry(device, *rule_of(step.request))
            for index, step in enumerate(steps)
            if step.makes
        }

    def tiled(self, index: int, side: int) -> bool:
        """Whether products want a side of a step in tiles."""
        return side in self._last.views[index].tiled

    def both(self, index: int) -> bool:
        """Whether both sides of a map to new coordinates are requested. Inference has no use for
        the second, which is as large."""
        return 1 in self._last.views[index].requested

    def passing(self, index: int) -> bool:
        """Whether nobody reads the slots of a step that makes coordinates once it is linked: they
        become no table."""
        return not self.both(index) or self._geometries[index].class_offsets is not None

    def scratch(self, rows: Mapping[int, int]) -> Slab | None:
        """Slab for what `passing` steps need until they are linked. rows: of every level, as far as
        there is memory for them."""
        if not self.sharing:
            return None
        size = sum(
            scratch_elements(
                rows[step.level], self._geometries[index].n_row_offsets, rows[index + 1], step.request.order
            )
            for index, step in enumerate(self._steps)
            if step.makes and self.passing(index)
        )
        return Slab.or_none(size, self._device)

    def tables(self, rows: Mapping[int, int], room: Mapping[int, int]) -> list[Slabs]:
        """Slab for the tables of all steps that become tiles. rows: see `scratch`.  room: rows that
        levels had memory for when new levels were expanded from them."""
        if not self.sharing:
            return [NO_SLABS] * len(self._steps)
        looked_up, blank = 0, 0
        for index, step in enumerate(self._steps):
            n_offsets = len(step.request.offsets)
            if not step.makes:
                if self.tiled(index, 0):
                    looked_up += neighbor_table.table_elements(rows[step.out_level(index)], n_offsets)
                continue
            if self.tiled(index, 0):
                blank += Slab.rounded(n_offsets * rows[index + 1])
            if self.tiled(index, 1) and self.both(index) and self.passing(index):
                blank += Slab.rounded(n_offsets * room[step.level])
        looked_up_slab, blank_slab = Slab.or_none(looked_up, self._device), Slab.or_none(blank, self._device, _BLANK)
        return [self._slabs(index, looked_up_slab, blank_slab) for index in range(len(self._steps))]

    def batches(self, rows: Mapping[int, int]) -> list[range]:
        """Steps whose tables become tiles side by side, in order.  rows: see `scratch`."""
        begins, total = [0], 0
        for index in range(len(self._steps)):
            size = self._table_elements(index, rows)
            if total and total + size > BATCH:
                begins.append(index)
                total = 0
            total += size
        return [range(*pair) for pair in itertools.pairwise([*begins, len(self._steps)])]

    def _table_elements(self, index: int, rows: Mapping[int, int]) -> int:
        """Elements of the tables of a step that become tiles."""
        step = self._steps[index]
        first = rows[step.out_level(index)] if self.tiled(index, 0) else 0
        other = rows[step.level] if step.makes and self.tiled(index, 1) and self.both(index) else 0
        return len(step.request.offsets) * (first + other)

    def _slabs(self, index: int, looked_up: Slab | None, blank: Slab | None) -> Slabs:
        first, second = self.tiled(index, 0), self.tiled(index, 1)
        return looked_up if first else None, (blank if first else None, blank if second else None)
