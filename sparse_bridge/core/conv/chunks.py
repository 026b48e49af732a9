"""The pairs of a map, cut for a CPU: blocks of result rows whose products stay in its caches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..maps.host_integers import divided, stable_order
from ..maps.kernel_map import KernelMap

_PRODUCTS = 1 << 21  # values that the products of a block take
_PIECE = 1 << 15  # values that are gathered at a time, at least where many offsets share them
_ROWS = 1 << 20  # values of a block's rows, at most
_LONGEST = 1 << 15  # rows of a block and pairs of an item, at most
_FEW = 1 << 10  # rows of a block, at least
_MOST = 1 << 18  # pairs of a part
_THREADS = 8  # whose caches blocks are made for, at most: memory has to hold the products


class Item(NamedTuple):
    """Pairs of one offset: y[y_rows] += x[x_rows] @ matrix of `offset`."""

    offset: int
    n_pairs: int
    x_rows: torch.Tensor
    y_rows: torch.Tensor


@dataclasses.dataclass(eq=False)
class Part:
    """Items whose products lie one after another. rows: int32, the row of y of each of
    them.  begin, n_rows: of the block.  sizes: pairs of every item."""

    items: tuple[Item, ...]
    rows: torch.Tensor
    begin: int
    n_rows: int
    sizes: list[int]
    _sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(products, starts) int32: row begin + r is the sum of the products
        [starts[r] : starts[r + 1]] of that list."""
        if self._sums is None:
            places = self.rows - self.begin
            starts = torch.zeros(self.n_rows + 1, dtype=torch.int32, device=places.device)
            counts = torch.bincount(places, minlength=self.n_rows)
            torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
            self._sums = stable_order(places, self.n_rows).int(), starts
        return self._sums


class Block(NamedTuple):
    """Rows begin to end of y, and what adds up to them."""

    begin: int
    end: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """All pairs of a map but those of the dense offset.

    reverse: offsets count from the last one down.  dense: the offset that pairs every row with
    itself, -1 if none.  longest: most pairs of an item.  products: most pairs of a part.
    """

    blocks: tuple[Block, ...]
    reverse: bool
    dense: int
    longest: int
    products: int

    def items(self) -> Iterator[Item]:
        for block in self.blocks:
            for part in block.parts:
                yield from part.items


def chunks_of(kmap: KernelMap, width: int) -> Chunks:
    """Chunks of a map for rows of `width` channels; cut once per size of block and direction, and
    kept with the rulebook."""
    rulebook = kmap.rulebook
    key = ("chunks", kmap.side, _n_blocks(kmap, width))
    found: Chunks | None = rulebook.cache.get(key)
    if found is not None:
        return found
    if rulebook.symmetric and kmap.flipped:  # the other side with its offsets reversed
        found = dataclasses.replace(chunks_of(kmap.transposed(), width), reverse=True)
    else:
        found = _cut(kmap, key[2])
    rulebook.cache.put(key, found)
    return found


def _n_blocks(kmap: KernelMap, width: int) -> int:
    """Blocks of as many rows as the threads' caches hold products of."""
    n_rows = max(1, kmap.rulebook.n_rows[kmap.side])
    if kmap.device.type != "cpu":
        return 1
    lists = kmap.rulebook.lists()
    per_row = max(1, lists.starts[-1] * (2 if lists.mirrored else 1)) / n_rows
    size = min(_ROWS, max(_PRODUCTS, _PIECE * kmap.n_offsets) / per_row)
    rows = min(_LONGEST, max(_FEW, size * min(_THREADS, torch.get_num_threads()) / width))
    return max(1, round(n_rows / rows))


def _cut(kmap: KernelMap, n_blocks: int) -> Chunks:
    rulebook, n_offsets = kmap.rulebook, kmap.n_offsets
    n_y, n_x = rulebook.n_rows[kmap.side], rulebook.n_rows[1 - kmap.side]
    center = rulebook.center
    dense = center if center >= 0 and kmap.pair_list(center)[0].shape[0] == n_x == n_y else -1
    pairs = [kmap.pair_list(v) for v in range(n_offsets)]
    if dense >= 0:
        x_rows, y_rows = pairs[dense]
        pairs[dense] = x_rows[:0], y_rows[:0]
    x_rows = torch.cat([pair[0] for pair in pairs]).int()
    y_rows = torch.cat([pair[1] for pair in pairs]).int()
    lengths = [[len(pair[0]) for pair in pairs]]
    height = -(-n_y // n_blocks)
    if n_blocks > 1:
        block = divided(y_rows, height)
        order = stable_order(block, n_blocks)
        sizes = torch.bincount(block, minlength=n_blocks).tolist()
        starts = torch.tensor([0, *itertools.accumulate(lengths[0])], device=order.device)
        # Within a block the order ascends, so offsets follow one another there, too.
        lengths = [torch.searchsorted(at, starts).diff().tolist() for at in order.split(sizes)]
        x_rows, y_rows = x_rows.index_select(0, order), y_rows.index_select(0, order)
    blocks, at = [], 0
    for number, counted in enumerate(lengths):
        begin, end = min(n_y, number * height), min(n_y, (number + 1) * height)
        found = slice(at, at + sum(counted))
        parts = tuple(_parts(x_rows[found], y_rows[found], counted, begin, end - begin))
        blocks.append(Block(begin, end, parts))
        at = found.stop
    every = [part for block in blocks for part in block.parts]
    longest = max((item.n_pairs for part in every for item in part.items), default=0)
    products = max((len(part.rows) for part in every), default=0)
    return Chunks(tuple(blocks), False, dense, longest, products)


def _parts(
    x_rows: torch.Tensor, y_rows: torch.Tensor, lengths: Sequence[int], begin: int, n_rows: int
) -> Iterator[Part]:
    """The pairs of a block, offset by offset; in several parts where rows have a great many."""
    pieces = [
        (v, min(_LONGEST, length - done))
        for v, length in enumerate(lengths)
        for done in range(0, length, _LONGEST)
    ]
    sizes = [size for _, size in pieces]
    cut = zip(pieces, x_rows.split(sizes), y_rows.split(sizes), strict=True)
    items: list[Item] = []
    start = end = 0
    for (v, size), x_part, y_part in cut:
        if items and end + size - start > _MOST:
            yield _part(items, y_rows[start:end], begin, n_rows)
            items, start = [], end
        items.append(Item(v, size, x_part, y_part))
        end += size
    if items:
        yield _part(items, y_rows[start:end], begin, n_rows)


def _part(items: Sequence[Item], rows: torch.Tensor, begin: int, n_rows: int) -> Part:
    return Part(tuple(items), rows, begin, n_rows, [item.n_pairs for item in items])
