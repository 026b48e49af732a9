"""Pair lists of several maps, side by side: counted in one launch, written in another.

Gradients of weights read a map's pairs offset by offset. How many there are only the device knows;
asked map by map, the host would wait for it in the middle of every backward pass. Counted as soon
as there are tiles, the numbers are on the host long before that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.fetched import Fetched
from ..runtime.launch import cdiv, register
from ..runtime.target import Target, current_stream
from ..runtime.uploads import uploaded
from .tile_batch import number_at, own_at, pointer_at
from .tile_list import TILE, TileList
from .tile_packing import MOST_LISTS, PAIRS, store_pairs, write_pairs

# Of a record, int64: addresses of counts, ends, starts, packed, rows; lists, pairs of tiles;
# addresses of the entries and of the rows listed.
FIELDS = 9
BLOCK = 1024

# (table entries [P], table rows [P], starts [lists + 1] int64), see `compact_pairs`
Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _wide(record_ptr, field):
    return tl.load(record_ptr + field).to(tl.pointer_type(tl.int64))


@triton.jit
def _ends_each(records_ptr, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """grid: (lists, maps). Running sums of the counts, and where the lists start."""
    record = records_ptr + tl.program_id(1) * FIELDS
    n_lists, n_pairs = number_at(record, 5), number_at(record, 6)
    v, lane = tl.program_id(0), tl.arange(0, BLOCK)
    if v < n_lists:
        starts = _wide(record, 2)
        first = v.to(tl.int64) * n_pairs
        counts, sums = pointer_at(record, 0), tl.zeros((BLOCK,), tl.int64)
        for u in range(v):
            for at in range(0, n_pairs, BLOCK):
                sums += tl.load(counts + at + lane, mask=at + lane < n_pairs, other=0)
            counts += n_pairs
        total = tl.sum(sums, 0)
        tl.store(starts + v, total)
        ends = _wide(record, 1) + first
        for at in range(0, n_pairs, BLOCK):
            inside = at + lane < n_pairs
            count = tl.load(counts + at + lane, mask=inside, other=0)
            tl.store(ends + at + lane, total + tl.cumsum(count, 0), mask=inside)
            total += tl.sum(count, 0)
        if v == n_lists - 1:
            tl.store(starts + n_lists, total)


@triton.jit
def _pairs_each(records_ptr, FIELDS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """grid: (blocks of pairs of tiles, lists or less, maps)."""
    record = records_ptr + tl.program_id(2) * FIELDS
    n_lists, n_pairs = number_at(record, 5), number_at(record, 6)
    if tl.program_id(0) * PAIRS < n_pairs:
        store_pairs(
            own_at(record, 3),
            own_at(record, 4),
            _wide(record, 1),
            pointer_at(record, 0),
            pointer_at(record, 7),
            pointer_at(record, 8),
            n_lists,
            n_pairs,
            PAIRS,
            BLOCK,
        )


def room_for_records(maps: int) -> int:
    """Numbers that a captured batch of so many maps sends, see `uploads_later`."""
    return maps * FIELDS


ends_kernel = register(_ends_each)
pairs_kernel = register(_pairs_each)


class PairBatch:
    """The pair lists of several maps: of the first `n_lists` offsets of each map's tiles, ordered
    as `compact_pairs` orders them. Counted now; written when the first map's are taken.

    tiles: with one order for all offsets, at least one of them, each with rows.  rooms: pairs that each map's
    lists have memory for, where the host does not learn how many there are, as in a capture; see `ListsInTurn`.
    lasting: whoever takes lists may keep them.
    """

    lasting = True

    def __init__(
        self, tiles: Sequence[TileList], n_lists: Sequence[int], target: Target, rooms: Sequence[int] | None = None
    ) -> None:
        device = tiles[0].memory.device
        self._tiles, self._n_lists, self._target = list(tiles), list(n_lists), target
        self._stream: int | None = current_stream(device)  # None: nothing is counted
        self._lists: list[Lists] | None = None
        self._rooms = rooms
        starts = list(itertools.accumulate((count + 1 for count in n_lists), initial=0))
        sizes = (tile_list.n_pairs * count for tile_list, count in zip(tiles, n_lists, strict=True))
        ends = list(itertools.accumulate(sizes, initial=starts[-1]))
        self._memory = torch.empty(ends[-1], dtype=torch.int64, device=device)
        self._starts, self._ends = starts, ends
        grid = (max(n_lists), len(tiles), 1)
        ends_kernel.launch(device, target, grid, (self._records(),), (FIELDS, BLOCK), {"num_warps": 4}, ())
        if rooms is None:
            self._counted = Fetched([self._memory[: starts[-1]].view(torch.int32)])

    def take(self, index: int) -> Lists | None:
        """The lists of the map at `index`. None on another stream than the one that counted, where
        others may have been written."""
        if self._stream is None or self._stream != current_stream(self._memory.device):
            return None
        if self._lists is None:
            halves = self._counted.read()[0]  # of int64
            lasts = [end - 1 for end in self._starts[1:]]
            totals = [(halves[2 * i] & 0xFFFFFFFF) + (halves[2 * i + 1] << 32) for i in lasts]
            self._lists = self.write(totals)
            self._tiles.clear()
        return self._lists[index]

    @property
    def numbers(self) -> torch.Tensor:
        """int64: where the lists of every map start, and the running sums of its counts."""
        return self._memory

    def written(self, index: int) -> Lists:
        """Queue the lists of one map, with its room."""
        assert self._rooms is not None
        tiles, n_lists = self._tiles[index], self._n_lists[index]
        starts = self._memory[self._starts[index] :][: n_lists + 1]
        ends = self._memory[self._ends[index] :][: n_lists * tiles.n_pairs]
        entries, rows = (tiles.memory.new_empty(self._rooms[index], dtype=torch.int32) for _ in range(2))
        write_pairs(tiles, ends, tiles.counts, entries, rows, n_lists, self._target)
        return entries, rows, starts

    def write(self, totals: Sequence[int]) -> list[Lists]:
        """Queue the lists of all maps, which have so many pairs."""
        sizes = [size for total in totals for size in (total, -total % 4)] * 2  # 16-byte aligned
        block = torch.empty(sum(sizes), dtype=torch.int32, device=self._memory.device)
        parts, count = block.split(sizes)[::2], len(totals)
        starts = self._memory[: self._starts[-1]].split([n_lists + 1 for n_lists in self._n_lists])
        lists = list(zip(parts[:count], parts[count:], starts, strict=True))
        if block.numel():
            records = self._records([(x.data_ptr(), y.data_ptr()) for x, y, _ in lists], block)
            most = max(tile_list.n_pairs for tile_list in self._tiles)
            pairs_kernel.launch(
                block.device,
                self._target,
                (cdiv(most, PAIRS), min(max(self._n_lists), MOST_LISTS), len(lists)),
                (records,),
                (FIELDS, PAIRS, 2 * TILE),
                {"num_warps": 4},
                (),
            )
        return lists

    def _records(self, lists: Sequence[tuple[int, int]] = (), block: torch.Tensor | None = None) -> torch.Tensor:
        """lists: addresses in `block` of the entries and the rows of every map, once there are."""
        records, memory = list[int](), self._memory.data_ptr()
        for index, tile_list in enumerate(self._tiles):
            tiles = tile_list.memory.data_ptr()
            records += (
                tiles + 4 * tile_list.counts_at,
                memory + 8 * self._ends[index],
                memory + 8 * self._starts[index],
                tiles + 4 * tile_list.packed_at,
                tiles,
                self._n_lists[index],
                tile_list.n_pairs,
                *(lists[index] if lists else (0, 0)),
            )
        reaches = [self._memory, *(tile_list.memory for tile_list in self._tiles)]
        return uploaded(records, self._memory.device, reaches + ([] if block is None else [block]))

    def __reduce__(self) -> Any:
        """A copy, perhaps in another process, has nothing coming."""
        return _nothing, ()


class ListsInTurn:
    """The pair lists of a captured batch's maps in one run of a model, those of one map at a time.

    A layer's gradient has them written, and they go when another map's are taken: a training step holds one map's
    lists beside its features, not all.
    """

    lasting = False

    def __init__(self, batch: PairBatch) -> None:
        self._batch, self._index = batch, -1
        self._latest: Lists | None = None

    def take(self, index: int) -> Lists:
        """The lists of the map at `index`, until another map's are taken."""
        if self._latest is None or index != self._index:
            self._latest = None  # before others ask for memory
            self._index, self._latest = index, self._batch.written(index)
        return self._latest

    def __reduce__(self) -> Any:
        """See `PairBatch`."""
        return _nothing, ()


def _nothing() -> PairBatch:
    batch = PairBatch.__new__(PairBatch)
    batch._stream = None
    return batch
