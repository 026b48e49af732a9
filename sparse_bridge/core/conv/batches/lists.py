"""Pair lists padded to one length, and the order in which their products add up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...device import stream_order
from ..chunks import Part

_BEHIND = torch.iinfo(torch.int64).max  # where padding is sorted to


class Sums(NamedTuple):
    """Row rows[r] is the sum of the products order[starts[r] : starts[r + 1]]; rows are distinct.
    All int32."""

    rows: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor


class Lists:
    """Lists of several offsets, padded to `height` pairs each, as a product reads them.

    offsets: in the order of the lists.  first: the first one where the others follow it one by one,
    else -1.  x_rows: int32 [n * height]; padding holds any rows that there are.
    """

    def __init__(self, offsets: list[int], height: int, x_rows: torch.Tensor) -> None:
        self.offsets, self.height, self.x_rows = offsets, height, x_rows
        steps = itertools.pairwise(offsets)
        self.first = offsets[0] if all(b == a + 1 for a, b in steps) else -1
        self._offset_indices: dict[bool, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.offsets)

    def offset_indices(self, n_offsets: int, reverse: bool) -> torch.Tensor:
        """int64 [n], its offsets among all; reverse: they count from the last one down."""
        offsets = self._offset_indices.get(reverse)
        if offsets is None:
            values = [n_offsets - 1 - v for v in self.offsets] if reverse else self.offsets
            offsets = torch.tensor(values, device=self.x_rows.device)
            offsets = self._offset_indices[reverse] = self._keep(offsets)
        return offsets

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was made now and stays."""
        return tensor


class Batch(Lists):
    """Lists of a `Padded` part.

    sizes: pairs of each list.  y_rows: int32 [n * height], like x_rows; padding repeats a list's
    last pair.  padding: bool [n, height, 1], where it is; None without.
    """

    def __init__(self, owner: Padded, number: int, offsets: list[int], sizes: list[int]) -> None:
        slots = owner.slots_of(number)
        super().__init__(offsets, max(sizes), owner.x_rows[slots])
        self._owner, self._number, self.sizes = owner, number, sizes
        self.y_rows = owner.y_rows[slots]
        padding = owner.padding[slots].view(len(sizes), self.height, 1)
        self.padding = None if min(sizes) == self.height else padding

    @property
    def sums(self) -> Sums:
        """Which products are whose. Waits for the device when the first batch of a part asks."""
        return self._owner.sums[self._number]

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._owner.keep(tensor)


class Padded:
    """The batches of a part, made at once: a new map takes few calls.

    x_rows, y_rows: int32, of every slot, that is, of the pairs and the padding of all batches.
    padding: bool, which slots are padding.
    """

    def __init__(self, part: Part, groups: Sequence[Sequence[int]]) -> None:
        device, self._n_rows = part.rows.device, part.begin + part.n_rows
        self._order = stream_order.of(device)
        self._kept: list[torch.Tensor] = []
        pairs = [0, *itertools.accumulate(part.sizes)]
        sizes = [[part.sizes[index] for index in group] for group in groups]
        heights = [max(own) for own in sizes for _ in own]
        slots = [0, *itertools.accumulate(heights)]
        self._slots = [slots[at] for at in (0, *itertools.accumulate(map(len, groups)))]
        self._pairs = [0, *itertools.accumulate(map(sum, sizes))]
        facts = [(pairs[index], part.sizes[index], number) for number, group in enumerate(groups) for index in group]
        columns = [*zip(*facts, strict=True), heights, slots[:-1]]
        begins, counts, numbers, high, low = torch.tensor(columns, device=device)
        index = torch.repeat_interleave(high, output_size=slots[-1])
        lane = torch.arange(slots[-1], device=device) - low[index]
        last = counts[index] - 1
        source = begins[index] + torch.minimum(lane, last)
        self.x_rows, self.y_rows = part.x_rows[source], part.rows[source]
        self.padding, self._numbers = lane > last, numbers[index]
        self._sums: list[Sums] | None = None
        self._lists = [
            ([part.offsets[index] for index in group], own) for group, own in zip(groups, sizes, strict=True)
        ]

    def batches(self) -> list[Batch]:
        """New ones. They hold this, not the other way round: memory goes with the last of them."""
        return [Batch(self, number, *lists) for number, lists in enumerate(self._lists)]

    def slots_of(self, number: int) -> slice:
        """The slots of a batch."""
        return slice(*self._slots[number : number + 2])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of any shape and dtype that was made now, for other streams, too; returned as it is."""
        self._kept.append(tensor)
        if self._order is not None:
            self._order.queued()
        return tensor

    def follow(self) -> None:
        """Have the current stream wait for what another one queued of this."""
        if self._order is not None:
            self._order.wait(self._tensors)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.x_rows, self.y_rows, self.padding, *self._kept)

    @property
    def sums(self) -> list[Sums]:
        """Of every batch: pairs in the order of batch and row, then of slots."""
        if self._sums is None:
            keys = (self._numbers * self._n_rows + self.y_rows).masked_fill_(self.padding, _BEHIND)
            keys, order = torch.sort(keys, stable=True)
            keys, counts = torch.unique_consecutive(keys[: self._pairs[-1]], return_counts=True)
            ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            firsts = torch.arange(len(self._lists) + 1, device=keys.device) * self._n_rows
            cuts = torch.searchsorted(keys, firsts).tolist()
            slots = order[: self._pairs[-1]].int()
            rows, ends = self.keep((keys % self._n_rows).int()), self.keep(ends.int())
            self._sums = []
            for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
                own = slots[self._pairs[number] : self._pairs[number + 1]] - self._slots[number]
                starts = ends[begin : end + 1] - self._pairs[number]
                self._sums.append(Sums(rows[begin:end], self.keep(own), self.keep(starts)))
            self._numbers = self._numbers[:0]  # of no use any more
        return self._sums
