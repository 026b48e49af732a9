"""Rows outside of a box, looked for without waiting for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.runtime.fetched import Fetched
from .boxes import Box


class Outside(NamedTuple):
    """How many rows are outside, and the first one: where it is, and its coordinates, batch
    first."""

    n_outside: int
    row: int
    site: list[int]


class OutsideLook:
    """The rows of coords int32 [N, 1 + D], N > 0, outside of `box`. Rows of a negative batch item
    do not count: they are dead on purpose."""

    def __init__(self, coords: torch.Tensor, box: Box) -> None:
        self.box = box
        columns = coords.unbind(1)
        wrong = columns[0] >= box.lo[0] + box.size[0]
        for column, low, size in zip(columns[1:], box.lo[1:], box.size[1:], strict=True):
            wrong = wrong | (column < low) | (column >= low + size)
        wrong = wrong & (columns[0] >= 0)
        first = wrong.int().argmax().view(1)
        count = wrong.sum(dtype=torch.int32).view(1)
        record = torch.cat([count, first.int(), coords.index_select(0, first)[0]])
        self._fetched = Fetched([record])

    @property
    def ready(self) -> bool:
        """Whether the device is done."""
        return self._fetched.ready

    def result(self) -> Outside | None:
        """None where no row is outside. Waits for the device unless `ready`."""
        count, row, *site = self._fetched.read()[0]
        return Outside(count, row, site) if count else None
