"""Memory that the launches of a scene share while its maps are queued, and that is gone when they
are tiles: one piece of each kind costs the host less than one for every map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...kernels.runtime.parts import Room
from ..geometry.host_moves import Rule
from ..maps.expansion import scratch_elements
from ..maps.request import MapRequest
from .history import RequestHistory, Step

if TYPE_CHECKING:
    from ...kernels.maps.coord_key import Geometry

_BLANK = -1  # what tables hold before anything is scattered to them


def rule_of(request: MapRequest) -> Rule:
    """(multiplier, divisor, sign) by which a request makes coordinates."""
    stride = request.stride
    one = (1,) * len(stride)
    return Rule(one, stride, -1) if request.kind == "strided" else Rule(stride, one, 1)


class SceneMemory:
    """Who shares memory in a scene that is asked what the last one was.

    rooms: for tables that are looked up, and for those that are scattered to; None where there is
    none, and tables take memory of their own.
    """

    def __init__(self, steps: Sequence[Step], last: RequestHistory, device: torch.device) -> None:
        self._steps, self._last, self._device = steps, last, device
        self._rooms: tuple[Room | None, Room | None] = (None, None)
        self._scratch: Room | None = None

    def tiled(self, place: int, side: int) -> bool:
        """Whether products want a side of a step in tiles."""
        return side in self._last.tiled.get(place, ())

    def both(self, place: int) -> bool:
        """Whether both sides of a map to new coordinates are asked for. Inference has no use for
        the second, which is as large."""
        return 1 in self._last.asked.get(place, ())

    def geometry(self, place: int) -> Geometry:
        """Of a step that makes coordinates."""
        request = self._steps[place].request
        return request.offsets.geometry(self._device, *rule_of(request))

    def passing(self, place: int) -> bool:
        """Whether nobody reads the slots of such a step once it is linked: they become no table."""
        return not self.both(place) or self.geometry(place).taps is not None

    def reserve_scratch(self, rows: Mapping[int, int]) -> None:
        """rows: of every level, as far as there is memory for them."""
        size = sum(
            scratch_elements(rows[step.level], self.geometry(place).n_taps)
            for place, step in enumerate(self._steps)
            if step.makes and self.passing(place)
        )
        self._scratch = Room.or_none(size, self._device)

    def scratch(self, place: int) -> Room | None:
        """Room for what a step that makes coordinates needs until it is linked."""
        return self._scratch if self.passing(place) else None

    def reserve_tables(self, rows: Mapping[int, int]) -> None:
        """As `reserve_scratch`, whose memory may be used again afterwards."""
        from ...kernels.maps.neighbor_table import table_elements

        found, blank = 0, 0
        for place, step in enumerate(self._steps):
            n_offsets = len(step.request.offsets)
            if not step.makes:
                here = step.level if step.out is None else step.out
                found += table_elements(rows[here], n_offsets) if self.tiled(place, 0) else 0
                continue
            if self.tiled(place, 0):
                blank += Room.rounded(n_offsets * rows[place + 1])
            if self.tiled(place, 1) and self.both(place) and self.passing(place):
                blank += Room.rounded(n_offsets * rows[step.level])
        self._scratch = None
        self._rooms = (
            Room.or_none(found, self._device), Room.or_none(blank, self._device, _BLANK)
        )  # fmt: skip

    def table(self, place: int) -> Room | None:
        """Room for the table of a step between given coordinates."""
        return self._rooms[0] if self.tiled(place, 0) else None

    def linked(self, place: int) -> tuple[Room | None, Room | None]:
        """Room for both sides of a step that makes coordinates."""
        blank = self._rooms[1]
        return blank if self.tiled(place, 0) else None, blank if self.tiled(place, 1) else None
