"""Coordinate look-up and map building in plain torch: the CPU's way, and any device's where Triton
does not run.

A sorted array of int64 keys takes the place of the GPU's hash table. Pair lists come out directly;
neighbour tables are derived from them only when something asks.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from ..geometry.boxes import Box
from ..geometry.offsets import Offsets

# Bringing features into spatial order and back costs two passes; it pays from this many pairs a
# row.
_ORDER_PAYS = 5


@dataclasses.dataclass(eq=False)
class PairLists:
    """(in row, out row) pairs grouped by offset, each group ascending in its out or in rows.

    in_rows, out_rows: int64 [P] (torch scatters much faster by int64 on CPUs).  starts: host
    integers [L + 1]; list v is [starts[v], starts[v + 1]). mirrored: lists of offsets 0..V/2 only;
    offset V - 1 - v has those of v with in and out swapped. order: None, or int64 [N]: in_rows and
    out_rows then count places of this order of the rows (place -> row), in which neighbours in
    space are neighbours in memory. runs: (first offset, length) of offsets that step along the last
    axis: where several of them are present for a row, the places they meet follow one another.
    """

    in_rows: torch.Tensor
    out_rows: torch.Tensor
    starts: list[int]
    mirrored: bool
    order: torch.Tensor | None = None
    runs: tuple[tuple[int, int], ...] = ()
    _inverse: torch.Tensor | None = None

    def inverse(self) -> torch.Tensor:
        """Place of every row, int64 [N]."""
        assert self.order is not None
        if self._inverse is None:
            place = torch.empty_like(self.order)
            place[self.order] = torch.arange(len(self.order), device=self.order.device)
            self._inverse = place  # only when it is whole: memory may run out, threads may look
        return self._inverse

    def rows(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(in rows, out rows) of a slice of the lists, as rows whatever the order."""
        if self.order is None:
            return self.in_rows[part], self.out_rows[part]
        return (
            self.order.index_select(0, self.in_rows[part]),
            self.order.index_select(0, self.out_rows[part]),
        )


def _keys(coords: torch.Tensor, box: Box, halo: tuple[int, ...]) -> torch.Tensor:
    """Row-major int64 keys in `box` widened by `halo` cells on both sides of every spatial axis."""
    key = coords[:, 0].long() - box.lo[0]
    for axis, reach in enumerate(halo):
        low, extent = box.lo[axis + 1], box.size[axis + 1]
        key = key * (extent + 2 * reach) + (coords[:, axis + 1].long() + (reach - low))
    return key


def _key_steps(offsets: Offsets, box: Box, halo: tuple[int, ...]) -> list[int]:
    """What each offset adds to such a key."""
    steps = []
    for offset in offsets.values:
        step = 0
        for axis, reach in enumerate(halo):
            step = step * (box.size[axis + 1] + 2 * reach) + offset[axis]
        steps.append(step)
    return steps


class HostIndex:
    """Live, distinct coordinates in key order.

    rows: int64 [U], the first row of each.  coords: the coordinates [U, 1 + D] in that order.
    """

    def __init__(self, coords: torch.Tensor, rows: torch.Tensor, box: Box) -> None:
        self.coords, self.rows, self.box = coords, rows, box
        self._sorted: dict[tuple[int, ...], torch.Tensor] = {}

    def keys(self, halo: tuple[int, ...]) -> torch.Tensor:
        """Ascending keys of the box widened by `halo`; the order does not depend on the halo."""
        found = self._sorted.get(halo)
        if found is None:
            found = _keys(self.coords, self.box, halo)
            if len(self._sorted) > 8:
                self._sorted.clear()
            self._sorted[halo] = found
        return found

    def find(
        self, query: torch.Tensor, steps: list[int], halo: tuple[int, ...]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For every step: (positions where query + step is present, its sorted place), int64.

        Steps that differ by one (neighbours along the last axis) take one search together: the
        place of the next key is this one's, plus one if it was present (the one-shot search of
        Spira, MLSys 2026).
        """
        sentinel = torch.iinfo(torch.int64).max
        keys = torch.cat([self.keys(halo), query.new_full((1,), sentinel)])
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        last = 0
        place = present = None
        for step in sorted(set(steps)):
            wanted = query + step
            if place is not None and present is not None and step == last + 1:
                place = place + present
            else:
                place = torch.searchsorted(keys, wanted)
            present = keys.index_select(0, place) == wanted
            hits = present.nonzero().squeeze(1)
            found[step] = (hits, place.index_select(0, hits))
            last = step
        return [found[step] for step in steps]


@dataclasses.dataclass(eq=False)
class Indexed:
    """index, plus what was seen on the way: alive int32 [N] (row or -1; None if all live), inverse
    int64 [N] (sorted place of each row's coordinate, -1 if dead)."""

    index: HostIndex
    alive: torch.Tensor | None
    unique: bool
    inverse: torch.Tensor


def build(coords: torch.Tensor, box: Box) -> Indexed:
    """Index the rows of `coords` [N, 1 + D] that lie in `box`; of equal coordinates the first row
    counts."""
    lo = torch.tensor(box.lo, dtype=torch.int64, device=coords.device)
    size = torch.tensor(box.size, dtype=torch.int64, device=coords.device)
    shifted = coords.long() - lo
    inside = ((shifted >= 0) & (shifted < size)).all(1)
    all_alive = bool(inside.all())
    live = (
        torch.arange(coords.shape[0], device=coords.device)
        if all_alive
        else inside.nonzero().squeeze(1)
    )
    keys = _keys(coords.index_select(0, live), box, (0,) * box.dimension)
    keys, order = torch.sort(keys, stable=True)
    rows = live.index_select(0, order)
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    unique = bool(first.all())
    inverse = torch.full((coords.shape[0],), -1, dtype=torch.int64, device=coords.device)
    inverse[rows] = first.cumsum(0) - 1
    if not unique:
        rows = rows[first]
    alive = None if all_alive else torch.where(inside, 0, -1).int()
    return Indexed(HostIndex(coords.index_select(0, rows), rows, box), alive, unique, inverse)


def collect(
    found: list[tuple[torch.Tensor, torch.Tensor]],
    mirrored: bool = False,
    order: torch.Tensor | None = None,
) -> PairLists:
    """One list of the pairs (in rows, out rows) of every offset."""
    starts = [0]
    for in_rows, _ in found:
        starts.append(starts[-1] + in_rows.shape[0])
    in_all = torch.cat([pair[0] for pair in found])
    return PairLists(in_all, torch.cat([pair[1] for pair in found]), starts, mirrored, order)


def submanifold(index: HostIndex, offsets: Offsets, n_rows: int, keep_center: bool) -> PairLists:
    """Pairs among the rows of `index`; symmetric offsets are looked up by half and mirrored.

    keep_center: pair every one of the `n_rows` rows with itself at the zero offset (dead rows too),
    else none.
    """
    halo = tuple(offsets.reach(axis) for axis in range(offsets.dimension))
    keys, rows = index.keys(halo), index.rows
    mirrored, center = offsets.symmetric, offsets.center
    steps = _key_steps(offsets, index.box, halo)
    half = range(len(offsets) // 2 + 1 if mirrored else len(offsets))
    searched = iter(index.find(keys, [steps[v] for v in half if v != center], halo))
    whole = rows.shape[0] == n_rows
    found = []
    for v in half:
        if v == center:
            every = torch.arange(n_rows if keep_center else 0, device=keys.device)
            found.append((every, every))
            continue
        hits, place = next(searched)
        if not whole:  # places count live rows only
            hits, place = rows.index_select(0, hits), rows.index_select(0, place)
        found.append((place, hits))
    lists = collect(found, mirrored, rows if whole else None)
    lists.runs = _runs(offsets)
    if whole and lists.starts[-1] * (2 if mirrored else 1) < _ORDER_PAYS * n_rows:
        in_rows, out_rows = lists.rows(slice(None))
        lists = PairLists(in_rows, out_rows, lists.starts, mirrored)
    return lists


@functools.cache
def _runs(offsets: Offsets) -> tuple[tuple[int, int], ...]:
    """Groups of at most three consecutive offsets, each one step further along the last axis."""
    step = (0,) * (offsets.dimension - 1) + (1,)
    groups: list[tuple[int, int]] = []
    for v, offset in enumerate(offsets.values):
        before = offsets.values[v - 1] if v else None
        follows = (
            before is not None and tuple(a - b for a, b in zip(offset, before, strict=True)) == step
        )
        if follows and groups[-1][1] < 3:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
        else:
            groups.append((v, 1))
    return tuple(groups)


def lookup(
    index: HostIndex,
    coords: torch.Tensor,
    alive: torch.Tensor | None,
    offsets: Offsets,
    stride: tuple[int, ...],
) -> PairLists:
    """Pairs (row of `index`, row of `coords`): coordinate * stride + offset, for every offset."""
    box = index.box
    halo = tuple(offsets.reach(axis) for axis in range(offsets.dimension))
    low = torch.tensor(
        [box.lo[0], *(box.lo[a + 1] - h for a, h in enumerate(halo))], device=coords.device
    )
    high = torch.tensor(
        [
            box.lo[0] + box.size[0],
            *(box.lo[a + 1] + box.size[a + 1] + h for a, h in enumerate(halo)),
        ],
        device=coords.device,
    )
    scaled = coords.long() * torch.tensor([1, *stride], device=coords.device)
    inside = ((scaled >= low) & (scaled < high)).all(1)
    if alive is not None:
        inside &= alive >= 0
    rows = inside.nonzero().squeeze(1)
    query = _keys(scaled.index_select(0, rows), box, halo)
    found = [
        (index.rows.index_select(0, place), rows.index_select(0, hits))
        for hits, place in index.find(query, _key_steps(offsets, box, halo), halo)
    ]
    return collect(found)


def expand(
    coords: torch.Tensor, alive: torch.Tensor | None, offsets: Offsets, multiplier: tuple[int, ...],
    divisor: tuple[int, ...], sign: int, out_box: Box,
) -> tuple[torch.Tensor, HostIndex, PairLists]:  # fmt: skip
    """New coordinates (c * multiplier + sign * offset) / divisor that are whole and lie in
    `out_box`.

    Returns them ([M, 1 + D] int32, ordered by the first row of `coords` that reaches each, then by
    offset), their index, and the pairs (row of coords, new row). Rows of `coords` must be distinct.
    """
    device, n_offsets = coords.device, len(offsets)
    batch = coords[:, 0].long() - out_box.lo[0]
    base = (batch >= 0) & (batch < out_box.size[0])
    if alive is not None:
        base &= alive >= 0
    axes: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
    for axis in range(offsets.dimension):
        scaled = coords[:, axis + 1].long() * multiplier[axis]
        low, extent = out_box.lo[axis + 1], out_box.size[axis + 1]
        table = {}
        for shift in {offset[axis] for offset in offsets.values}:
            reached = scaled + sign * shift
            whole = torch.div(reached, divisor[axis], rounding_mode="floor")
            ok = (whole * divisor[axis] == reached) & (whole >= low) & (whole < low + extent)
            table[shift] = (ok, whole - low)
        axes.append(table)
    keys, rows = [], []
    for offset in offsets.values:
        ok = base
        for axis, shift in enumerate(offset):
            ok = ok & axes[axis][shift][0]
        hit = ok.nonzero().squeeze(1)
        key = batch.index_select(0, hit)
        for axis, shift in enumerate(offset):
            key = key * out_box.size[axis + 1] + axes[axis][shift][1].index_select(0, hit)
        keys.append(key)
        rows.append(hit)
    in_rows = torch.cat(rows)
    every = torch.cat(keys)
    short = every.int() if out_box.volume < 1 << 31 else every  # sorted in half the time
    distinct, inverse = torch.unique(short, return_inverse=True)
    # A key's discoverer: the smallest (row, offset) that reaches it.
    rank = torch.cat([hit * n_offsets + v for v, hit in enumerate(rows)])
    first = torch.full_like(distinct, torch.iinfo(torch.int64).max, dtype=torch.int64)
    first.scatter_reduce_(0, inverse, rank, "amin")
    order = torch.argsort(first)
    number = torch.empty_like(order)
    number[order] = torch.arange(order.shape[0], device=device)
    new = _coordinates(distinct.index_select(0, order).long(), out_box)
    starts = [0]
    for hit in rows:
        starts.append(starts[-1] + hit.shape[0])
    pairs = PairLists(in_rows, number.index_select(0, inverse), starts, False)
    return new, HostIndex(new.index_select(0, number), number, out_box), pairs


def _coordinates(keys: torch.Tensor, box: Box) -> torch.Tensor:
    columns = []
    for low, extent in zip(reversed(box.lo), reversed(box.size), strict=True):
        columns.append((keys % extent + low).int())
        keys = torch.div(keys, extent, rounding_mode="floor")
    return torch.stack(columns[::-1], 1)
