"""The pairs of a map, cut and merged for a CPU: pieces that a core's cache holds, and runs of
neighbours in one product."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ..maps.kernel_map import KernelMap
from .host_products import BLOCK

Item = tuple[int, int, int, torch.Tensor, torch.Tensor]  # see `Chunks`

_HELD = 2  # products held at a time, per row
_RUNS_PAY = 12  # pairs a row from which merging runs beats the products it splits


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """Pieces of the pair lists: in places of `order` where runs were merged, in rows otherwise
    (`order` is None).

    items: (offset, width, pairs, x places, y places): y[y places] += [x[p], .., x[p + width - 1]] @
    [offset, .., offset + width - 1]. Offsets count from the last one down where `reverse` is set.
    dense: the offset that pairs every row with itself and has no items, -1 if none.  longest: most
    pairs of an item.  widest: largest width.
    """

    items: tuple[Item, ...]
    reverse: bool
    dense: int
    longest: int
    widest: int
    order: torch.Tensor | None
    n_rows: tuple[int, int]  # of y and of x
    _sums: dict[int, tuple[RowSums, ...]] = dataclasses.field(default_factory=dict)

    def sums(self, side: int) -> tuple[RowSums, ...]:
        """How the products of all pairs add up to the rows of y (side 0) or of x (side 1): one
        after another, as few as memory allows."""
        found = self._sums.get(side)
        if found is None:
            found = self._sums[side] = tuple(_row_sums(self, side))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class RowSums:
    """Sums over a run of items: row r is the sum of the products bags[starts[r] : starts[r + 1]].

    items: slice of `Chunks.items`; their products lie one after another, behind those of the dense
    offset (rows of its own, in order) where `dense` is set.  products: how many.
    """

    items: slice
    dense: bool
    products: int
    bags: torch.Tensor
    starts: torch.Tensor


def _row_sums(chunks: Chunks, side: int) -> Iterator[RowSums]:
    n_rows = chunks.n_rows[side]
    rows = [item[3] if side else item[4] for item in chunks.items]
    begin, dense = 0, chunks.dense >= 0
    while begin < len(rows) or dense:
        end, size = begin, 0
        while end < len(rows) and (end == begin or size + len(rows[end]) <= _HELD * n_rows):
            size += len(rows[end])
            end += 1
        parts = rows[begin:end]
        if dense:
            parts.insert(0, torch.arange(n_rows, device="cpu"))
        targets = torch.cat(parts)
        starts = torch.zeros(n_rows + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(torch.bincount(targets, minlength=n_rows), 0, out=starts[1:])
        bags = torch.sort(targets.int(), stable=True).indices  # 32 bits: half the passes
        yield RowSums(slice(begin, end), dense, len(targets), bags, starts)
        begin, dense = end, False


def chunks_of(kmap: KernelMap, merge: bool) -> Chunks:
    """Chunks of a map; cut once per direction and kept with the rulebook. merge: runs may become
    one item."""
    rulebook = kmap.rulebook
    lists = rulebook.lists()
    total = lists.starts[-1] * (2 if lists.mirrored else 1)
    merge = (
        merge and lists.order is not None and bool(lists.runs) and total >= _RUNS_PAY * kmap.n_in
    )
    key = ("chunks", kmap.side, merge)
    found: Chunks | None = rulebook.cache.get(key)
    return rulebook.cache.put(key, _cut(kmap, merge)) if found is None else found


def _cut(kmap: KernelMap, merge: bool) -> Chunks:
    rulebook, last = kmap.rulebook, kmap.n_offsets - 1
    # Read backwards, a submanifold map is itself with the offsets reversed; only then do places
    # ascend with the offsets.
    reverse = merge and kmap.flipped
    n_y, n_x = rulebook.n_rows[kmap.side], rulebook.n_rows[1 - kmap.side]
    center = rulebook.center
    dense = center if center >= 0 and kmap.place_list(center)[0].shape[0] == n_x == n_y else -1
    if dense >= 0 and reverse:
        dense = last - dense

    def pairs(offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        find = kmap.place_list if merge else kmap.pair_list
        return find(last - offset if reverse else offset)

    pieces: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
    if merge:
        for first, length in rulebook.lists().runs:
            offsets = [v for v in range(first, first + length) if v != dense]
            pieces += _merge(offsets, [pairs(v) for v in offsets], n_y)
    else:
        pieces = [(v, 1, *pairs(v)) for v in range(kmap.n_offsets) if v != dense]
    items = []
    for offset, width, x_rows, y_rows in pieces:
        for x_part, y_part in zip(x_rows.split(BLOCK), y_rows.split(BLOCK), strict=True):
            if len(x_part):
                items.append((offset, width, len(x_part), x_part, y_part))
    longest = max((item[2] for item in items), default=0)
    widest = max((item[1] for item in items), default=1)
    order = rulebook.lists().order if merge else None
    return Chunks(tuple(items), reverse, dense, longest, widest, order, (n_y, n_x))


def _merge(offsets, found, n_rows: int):  # type: ignore[no-untyped-def]
    """Split up to three neighbouring offsets into triples, doubles and singles: every pair lands in
    exactly one."""
    device = found[0][0].device if found else None
    place = [torch.full((n_rows,), -1, dtype=torch.int64, device=device) for _ in offsets]
    for where, (x_rows, y_rows) in zip(place, found, strict=True):
        where[y_rows] = x_rows
    pieces = []
    for width in range(len(offsets), 0, -1):
        for first in range(len(offsets) - width + 1):
            window = place[first : first + width]
            if offsets[first + width - 1] - offsets[first] != width - 1:
                continue  # the centre is missing in between
            present = window[0] >= 0
            for where in window[1:]:
                present = present & (where >= 0)
            rows = present.nonzero().squeeze(1)
            if len(rows):
                pieces.append((offsets[first], width, window[0].index_select(0, rows), rows))
                for where in window:
                    where[rows] = -1
    return pieces
