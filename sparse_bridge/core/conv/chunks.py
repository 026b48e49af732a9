"""The pairs of a map, cut for a CPU: blocks of result rows whose products stay in its caches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..device import stream_order
from ..geometry.host_cells import on_host
from ..maps.host_integers import stable_order
from ..maps.kernel_map import KernelMap
from ..maps.pair_lists import PairLists
from .host_products import ROWS

_PRODUCTS = 1 << 21  # values that the products of a block take
_PIECE = 1 << 15  # values that are gathered at a time, at least where many offsets share them
_ROWS = 1 << 20  # values of a block's rows, at most
_LONGEST = 1 << 15  # rows of a block and pairs of an item, at most
_FEW = 1 << 10  # rows of a block, at least
_MOST = 1 << 18  # pairs of a part
_THREADS = 8  # whose caches blocks are made for, at most: memory has to hold the products


class Item(NamedTuple):
    """Pairs of one offset: y[y_rows] += x[x_rows] @ matrix of `offset`. x_rows, y_rows: int32 [n_pairs]."""

    offset: int
    n_pairs: int
    x_rows: torch.Tensor
    y_rows: torch.Tensor


class Part:
    """Items whose products lie one after another.

    x_rows, rows: int32, the row of x and of y of each pair.  begin, n_rows: of the block.
    offsets, sizes: of every item, and its pairs.  n_pairs: of all.  behind: earlier parts of the
    block have added to its rows.  cache: what was derived of it.
    """

    def __init__(
        self, pieces: Sequence[tuple[int, int]], x_rows: Any, rows: Any, begin: int, n_rows: int, behind: bool
    ) -> None:
        self.offsets = [v for v, _ in pieces]
        self.sizes = [size for _, size in pieces]
        self.begin, self.n_rows, self.behind = begin, n_rows, behind
        if isinstance(rows, np.ndarray):
            x_rows, rows = torch.from_numpy(x_rows), torch.from_numpy(rows)
        self.x_rows, self.rows = x_rows, rows
        self.n_pairs = sum(self.sizes)
        self.cache: dict[Any, Any] = {}
        self._order = stream_order.of(self.rows.device)

    def follow(self) -> None:
        """Have the current stream wait for the rows."""
        if self._order is not None:
            self._order.wait(lambda: (self.x_rows, self.rows))

    @functools.cached_property
    def items(self) -> tuple[Item, ...]:
        """Items in the order of their products; their rows are views of the part's."""
        cut = self.x_rows.split(self.sizes), self.rows.split(self.sizes)
        return tuple(map(Item, self.offsets, self.sizes, *cut))

    def slots(self, heights: Sequence[int]) -> Slots:
        """Where the products lie if every item takes so many rows, its pairs the first of them;
        made once for the same heights."""
        key = ("slots", *heights)
        slots: Slots | None = self.cache.get(key)
        if slots is None:
            slots = self.cache[key] = _slots(self, heights)
        return slots


class Slots(NamedTuple):
    """Products of a part, filled up.

    x_rows: int32 [n], the row of x of each; any row in what fills up.  order, starts: int32, row
    begin + r is the sum of order[starts[r] : starts[r + 1]]; where earlier parts have added to it,
    that sum comes first, as product n + r.
    """

    x_rows: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor


def _slots(part: Part, heights: Sequence[int]) -> Slots:
    sizes, n_slots = np.array(part.sizes), sum(heights)
    pair = np.arange(part.n_pairs) + np.repeat(np.cumsum(heights) - heights - np.cumsum(sizes) + sizes, sizes)
    x_rows = np.zeros(n_slots, np.int32)
    x_rows[pair] = on_host(part.x_rows)
    part_rows = on_host(part.rows)
    if part.begin:
        part_rows = part_rows - part.begin
    starts = np.zeros(part.n_rows + 1, np.int32)
    np.bincount(part_rows, minlength=part.n_rows).cumsum(dtype=np.int32, out=starts[1:])
    order = pair[stable_order(part_rows, part.n_rows)].astype(np.int32)
    if part.behind:
        every = np.arange(part.n_rows, dtype=np.int32)
        order = np.insert(order, starts[:-1], n_slots + every)
        starts[1:] += every + 1
    return Slots(*map(torch.from_numpy, (x_rows, order, starts)))


class Block(NamedTuple):
    """Rows begin to end of y, and what adds up to them."""

    begin: int
    end: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """All pairs of a map but those of the dense offset.

    reverse: offsets count from the last one down.  dense: the offset that pairs every row of y
    with the row of x of its number, -1 if none.  longest: most pairs of an item.  products: most
    pairs of a part.
    """

    blocks: tuple[Block, ...]
    reverse: bool
    dense: int
    longest: int
    products: int

    def backwards(self) -> Chunks:
        """The same pairs, of offsets in reverse order."""
        return dataclasses.replace(self, reverse=not self.reverse)

    def parts(self) -> Iterator[Part]:
        """The parts of all blocks, in order."""
        for block in self.blocks:
            yield from block.parts

    def items(self) -> Iterator[Item]:
        """The items of all parts, in order."""
        for part in self.parts():
            yield from part.items

    @property
    def nbytes(self) -> int:
        """Of the pairs, and of what was derived of them."""
        parts = list(self.parts())
        pairs: int = sum(part.x_rows.nbytes + part.rows.nbytes for part in parts)
        derived = (value for part in parts for value in part.cache.values() if isinstance(value, Slots))
        slots: int = sum(tensor.nbytes for rows in derived for tensor in rows)
        return pairs + slots


def chunks_of(kmap: KernelMap, width: int) -> Chunks:
    """Chunks of a map for rows of `width` channels; cut once per size of block and direction, and
    kept with the rulebook."""
    rulebook = kmap.rulebook
    rulebook.follow()
    key = _key(kmap, width)
    chunks: Chunks | None = rulebook.cache.get(key)
    if chunks is not None:
        return chunks
    if rulebook.symmetric and kmap.flipped:  # the other side with its offsets reversed
        chunks = chunks_of(kmap.transposed(), width).backwards()
    else:
        chunks = cut(kmap, -(-rulebook.n_rows[kmap.side] // key[2]), pairs_of(kmap))
    rulebook.cache.put(key, chunks)
    return chunks


def cached(kmap: KernelMap, width: int) -> bool:
    """Whether `chunks_of` has them."""
    return kmap.rulebook.cache.get(_key(kmap, width)) is not None


def _key(kmap: KernelMap, width: int) -> tuple[str, int, int]:
    return "chunks", kmap.side, n_blocks_of(kmap, width)


def n_blocks_of(kmap: KernelMap, width: int) -> int:
    """Blocks of as many rows as the threads' caches hold products of."""
    n_rows = kmap.rulebook.n_rows[kmap.side]
    if n_rows <= _FEW or kmap.device.type != "cpu":
        return 1
    lists = kmap.rulebook.lists()
    per_row = max(1, lists.starts[-1] * (2 if lists.mirrored else 1)) / n_rows
    size = min(_ROWS, max(_PRODUCTS, _PIECE * kmap.n_offsets) / per_row)
    rows = min(_LONGEST, max(_FEW, size * min(_THREADS, torch.get_num_threads()) / width))
    return max(1, round(n_rows / rows))


class Pairs(NamedTuple):
    """All pairs of a map but those of the dense offset, offset by offset.

    x_rows, y_rows: int32, on the CPU arrays, whose slices cost a tenth, else tensors.  counts: of
    every offset.  dense: see `Chunks`.
    """

    x_rows: Any
    y_rows: Any
    counts: list[int]
    dense: int


def cut(kmap: KernelMap, height: int, pairs: Pairs) -> Chunks:
    """Chunks in blocks of about `height` rows."""
    n_y = kmap.rulebook.n_rows[kmap.side]
    x_rows, y_rows, counts, dense = pairs
    lengths = [counts]
    height += -height % ROWS  # so that rows of blocks are aligned as those of all are
    n_blocks = -(-n_y // height)
    if n_blocks > 1:
        block = y_rows // np.int32(height)
        order = stable_order(block, n_blocks)
        starts = [0, *itertools.accumulate(counts)]
        # Within a block the order ascends, so offsets follow one another there, too.
        cuts = np.bincount(block, minlength=n_blocks).cumsum()[:-1]
        lengths = [np.diff(at.searchsorted(starts)).tolist() for at in np.split(order, cuts)]
        x_rows, y_rows = x_rows[order], y_rows[order]
    blocks, at = [], 0
    for number, counted in enumerate(lengths):
        begin, end = min(n_y, number * height), min(n_y, (number + 1) * height)
        parts = tuple(_parts(x_rows, y_rows, at, counted, begin, end - begin))
        blocks.append(Block(begin, end, parts))
        at += sum(counted)
    every = [part for block in blocks for part in block.parts]
    longest = max((max(part.sizes) for part in every), default=0)
    products = max((part.n_pairs for part in every), default=0)
    return Chunks(tuple(blocks), False, dense, longest, products)


def pairs_of(kmap: KernelMap) -> Pairs:
    """The pairs of a map in the direction in which it is read, those of mirrored offsets written out."""
    lists, n_offsets = kmap.rulebook.lists(), kmap.n_offsets
    n_mirrored = n_offsets // 2 if lists.mirrored else 0
    short = lists.short
    pair: tuple[Any, Any]
    if short is not None:
        counts, dense = short.counts[: n_offsets - n_mirrored], short.dense
        n_pairs = sum(counts)  # of an even number of offsets there is a list more
        pair = short.in_rows[:n_pairs], short.out_rows[:n_pairs]
    else:
        pair, counts, dense = _without_dense(kmap, lists, n_offsets - n_mirrored)
    if n_mirrored:
        starts = [0, *itertools.accumulate(counts)]
        parts = [slice(starts[v], starts[v + 1]) for v in reversed(range(n_mirrored))]
        join: Any = torch.cat if isinstance(pair[0], torch.Tensor) else np.concatenate
        x_rows, y_rows = (join([rows, *(others[part] for part in parts)]) for rows, others in (pair, pair[::-1]))
    else:
        x_rows, y_rows = pair
    counts += reversed(counts[:n_mirrored])
    x_rows, y_rows = (y_rows, x_rows) if kmap.flipped else (x_rows, y_rows)
    return Pairs(x_rows, y_rows, counts, dense)


def _without_dense(kmap: KernelMap, lists: PairLists, n_lists: int) -> tuple[tuple[Any, Any], list[int], int]:
    """((in rows, out rows) int32, pairs of every offset, the dense offset) of the first lists."""
    starts, center, n_rows = lists.starts, kmap.rulebook.center, kmap.rulebook.n_rows
    counts = [end - start for start, end in itertools.pairwise(starts[: n_lists + 1])]
    dense = center if center >= 0 and counts[center] == n_rows[0] else -1
    parts = [slice(starts[n_lists])]
    if dense >= 0:
        counts[dense] = 0
        parts = [slice(starts[dense]), slice(starts[dense + 1], starts[n_lists])]
    pair = lists.in_rows, lists.out_rows
    both: list[Any]
    if kmap.device.type == "cpu":
        both = [np.concatenate([rows.numpy()[p] for p in parts], dtype=np.int32, casting="same_kind") for rows in pair]
    else:
        both = [torch.cat([rows[p] for p in parts]).int() for rows in pair]
    return (both[0], both[1]), counts, dense


def _parts(x_rows: Any, y_rows: Any, at: int, lengths: Sequence[int], begin: int, n_rows: int) -> Iterator[Part]:
    """The pairs of a block, from `at` on, offset by offset; in several parts where rows have a
    great many."""
    pieces = [(v, length) for v, length in enumerate(lengths) if length]
    if max(lengths) > _LONGEST:
        pieces = [(v, min(_LONGEST, length - done)) for v, length in pieces for done in range(0, length, _LONGEST)]
    first, start, end = 0, at, at
    for number, (_, size) in enumerate(pieces):
        if number > first and end + size - start > _MOST:
            cut = slice(start, end)
            yield Part(pieces[first:number], x_rows[cut], y_rows[cut], begin, n_rows, first > 0)
            first, start = number, end
        end += size
    if pieces:
        cut = slice(start, end)
        yield Part(pieces[first:], x_rows[cut], y_rows[cut], begin, n_rows, first > 0)
