"""Pair lists padded to one length, and the order in which their products add up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...device import stream_order
from ..chunks import Chunks, Item, Part
from .rule import Limits, groups_of

_BEHIND = torch.iinfo(torch.int32).max  # where rows of padding are sorted to


class Sums(NamedTuple):
    """Row rows[r] is the sum of the products order[starts[r] : starts[r + 1]]; rows are distinct.
    All int32."""

    rows: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor


class Batch:
    """Lists of several offsets, padded to `height` pairs each.

    sizes: pairs of each list.  x_rows, y_rows: int32 [n * height]; padding repeats a list's last
    pair.  padding: bool [n, height, 1], where it is; None without.
    """

    def __init__(self, part: Part, places: Sequence[int]) -> None:
        device = part.rows.device
        starts = [0, *itertools.accumulate(part.sizes)]
        self.sizes = [part.sizes[place] for place in places]
        self.height = max(self.sizes)
        offsets = [part.offsets[place] for place in places]
        facts = torch.tensor([offsets, [starts[place] for place in places], self.sizes])
        self._offsets, begins, sizes = facts.to(device).unbind(0)
        self._mirrored: torch.Tensor | None = None
        lanes, sizes = torch.arange(self.height, device=device), sizes.unsqueeze(1)
        source = (begins.unsqueeze(1) + torch.minimum(lanes, sizes - 1)).flatten()
        self.x_rows, self.y_rows = part.x_rows[source], part.rows[source]
        even = min(self.sizes) == self.height
        self.padding = None if even else (lanes >= sizes).unsqueeze(2)
        self._sums: Sums | None = None
        self._order = stream_order.of(device)

    def __len__(self) -> int:
        return len(self.sizes)

    def follow(self) -> None:
        """Have the current stream wait for what another one queued of this."""
        if self._order is not None:
            self._order.wait(self._held)

    def _held(self) -> Iterator[torch.Tensor]:
        tensors = (self._offsets, self._mirrored, self.x_rows, self.y_rows, self.padding)
        for tensor in (*tensors, *(self._sums or ())):
            if tensor is not None:
                yield tensor

    def _queued(self) -> None:
        if self._order is not None:
            self._order.queued()

    def places(self, n_offsets: int, reverse: bool) -> torch.Tensor:
        """int64 [n], its offsets among all; reverse: they count from the last one down."""
        if not reverse:
            return self._offsets
        if self._mirrored is None:
            self._mirrored = n_offsets - 1 - self._offsets
            self._queued()
        return self._mirrored

    @property
    def sums(self) -> Sums:
        """Which products are whose. Waits for the device when it is made."""
        if self._sums is None:
            rows, n_pairs = self.y_rows, sum(self.sizes)
            if self.padding is not None:
                rows = rows.masked_fill(self.padding.flatten(), _BEHIND)
            rows, order = torch.sort(rows, stable=True)
            rows, counts = torch.unique_consecutive(rows[:n_pairs], return_counts=True)
            starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            self._sums = Sums(rows, order[:n_pairs].int(), starts.int())
            self._queued()
        return self._sums


class Steps(NamedTuple):
    """The pair lists of a map: one by one, and together."""

    alone: tuple[Item, ...]
    batches: tuple[Batch, ...]


def steps_of(chunks: Chunks, limits: Limits | None) -> Steps:
    """All lists, together as the rule has them; None: one by one."""
    if limits is None:
        return Steps(tuple(chunks.items()), ())
    alone: list[Item] = []
    batches: list[Batch] = []
    for part in chunks.parts():
        part.follow()
        found = _split(part, limits)
        alone += found.alone
        batches += found.batches
    for batch in batches:
        batch.follow()
    return Steps(tuple(alone), tuple(batches))


def _split(part: Part, limits: Limits) -> Steps:
    """The lists of a part; made once for the same limits, and kept with it."""
    found: Steps | None = part.kept.get(limits)
    if found is None:
        groups = groups_of(part.sizes, limits)
        together = {place for group in groups for place in group}
        alone = (item for place, item in enumerate(part.items) if place not in together)
        found = Steps(tuple(alone), tuple(Batch(part, group) for group in groups))
        part.kept[limits] = found
    return found
