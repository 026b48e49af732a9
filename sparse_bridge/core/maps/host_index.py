"""Coordinate look-up and map building in plain torch: the CPU's way, and any device's where Triton
does not run.

A sorted array of int64 keys takes the place of the GPU's hash table. Pair lists come out directly;
neighbour tables are derived from them only when something asks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ..geometry.boxes import Box
from ..geometry.offsets import Offsets
from .host_integers import differs, distinct, divided, places, search, sort_keys

_MET = 1 << 22  # offsets and rows that are compared at a time


@dataclasses.dataclass(eq=False)
class PairLists:
    """(in row, out row) pairs grouped by offset, each group ascending in its out or in rows.

    in_rows, out_rows: int64 [P] (torch scatters much faster by int64 on CPUs).  starts: host
    integers [L + 1]; list v is [starts[v], starts[v + 1]). mirrored: lists of offsets 0..V/2 only;
    offset V - 1 - v has those of v with in and out swapped.
    """

    in_rows: torch.Tensor
    out_rows: torch.Tensor
    starts: list[int]
    mirrored: bool


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
                place = search(keys, wanted)
            present = keys.index_select(0, place) == wanted
            hits = places(present)
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
    live = _live(coords, box)
    kept = coords if live is None else coords.index_select(0, live)
    keys, order = sort_keys(_keys(kept, box, (0,) * box.dimension), box.volume)
    rows = order if live is None else live.index_select(0, order)
    first = differs(keys)
    unique = bool(first.all())
    inverse = torch.full((coords.shape[0],), -1, dtype=torch.int64, device=coords.device)
    inverse.scatter_(0, rows, first.cumsum(0) - 1)
    if not unique:
        rows = rows.index_select(0, places(first))
    alive = None
    if live is not None:
        alive = torch.full((coords.shape[0],), -1, dtype=torch.int32, device=coords.device)
        alive[live] = 0
    return Indexed(HostIndex(coords.index_select(0, rows), rows, box), alive, unique, inverse)


def _live(coords: torch.Tensor, box: Box) -> torch.Tensor | None:
    """The rows that lie in `box`, int64; None if all do."""
    lo = torch.tensor(box.lo, dtype=torch.int64, device=coords.device)
    end = lo + torch.tensor(box.size, dtype=torch.int64, device=coords.device)
    if len(coords):
        least, most = coords.aminmax(dim=0)
        if bool(((least >= lo) & (most < end)).all()):
            return None
    wide = coords.long()
    return places(((wide >= lo) & (wide < end)).all(1))


def collect(found: list[tuple[torch.Tensor, torch.Tensor]], mirrored: bool = False) -> PairLists:
    """One list of the pairs (in rows, out rows) of every offset."""
    starts = [0]
    for in_rows, _ in found:
        starts.append(starts[-1] + in_rows.shape[0])
    in_all = torch.cat([pair[0] for pair in found])
    return PairLists(in_all, torch.cat([pair[1] for pair in found]), starts, mirrored)


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
    found = []
    for v in half:
        if v == center:
            every = torch.arange(n_rows if keep_center else 0, device=keys.device)
            found.append((every, every))
            continue
        hits, place = next(searched)
        found.append((rows.index_select(0, place), rows.index_select(0, hits)))
    return collect(found, mirrored)


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
    rows = places(inside)
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
    extents = out_box.size[1:]
    strides = [math.prod(extents[axis:]) for axis in range(len(extents) + 1)]  # of keys
    steps, keys = [], batch * strides[0]
    for axis, step in enumerate(strides[1:]):
        scaled = coords[:, axis + 1].long() * multiplier[axis]
        bounds = out_box.lo[axis + 1], out_box.size[axis + 1]
        moves = [sign * offset[axis] for offset in offsets.values]
        steps.append(_steps(scaled, moves, divisor[axis], bounds, step))
    v, in_rows, every = _reached(base, keys, steps)
    new_keys, inverse = distinct(every, out_box.volume)
    # A key's discoverer: the smallest (row, offset) that reaches it.
    rank = in_rows * n_offsets + v
    first = torch.full_like(new_keys, torch.iinfo(torch.int64).max)
    first.scatter_reduce_(0, inverse, rank, "amin")
    order = sort_keys(first, coords.shape[0] * n_offsets)[1]
    number = torch.empty_like(order)
    number.scatter_(0, order, torch.arange(order.shape[0], device=device))
    new = _coordinates(new_keys.index_select(0, order), out_box)
    starts = torch.searchsorted(v, torch.arange(n_offsets + 1, device=device)).tolist()
    pairs = PairLists(in_rows, number.index_select(0, inverse), starts, False)
    return new, HostIndex(new.index_select(0, number), number, out_box), pairs


@dataclasses.dataclass
class _Steps:
    """Where every offset leads along one axis: row which[v] of `meets`, whether cells are met there
    bool [S, N], and of `keys`, what that adds to their keys int64 [S, N]."""

    which: torch.Tensor
    meets: torch.Tensor
    keys: torch.Tensor


def _steps(
    scaled: torch.Tensor, moves: Sequence[int], divisor: int, bounds: tuple[int, int], step: int
) -> _Steps:
    """Along an axis whose cells, `bounds` (lowest, number), are `step` keys apart."""
    low, extent = bounds
    distances = sorted(set(moves))
    which = torch.tensor([distances.index(move) for move in moves], device=scaled.device)
    moved = scaled + torch.tensor(distances, device=scaled.device).unsqueeze(1)
    cell = divided(moved, divisor)
    meets = (cell >= low) & (cell < low + extent)
    if divisor != 1:
        meets &= cell * divisor == moved
    return _Steps(which, meets, (cell - low) * step)


def _reached(
    base: torch.Tensor, keys: torch.Tensor, steps: Sequence[_Steps]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offset, row, key) int64 of every cell that a row with `base` set reaches, by offset and then
    by row.  keys: to which those of the steps are added."""
    n_offsets, n_rows = len(steps[0].which), len(base)
    found = []
    together = max(1, _MET // max(1, n_rows))
    for first in range(0, n_offsets, together):
        which = [step.which[first : first + together] for step in steps]
        meets = base.expand(len(which[0]), n_rows)
        for step, of in zip(steps, which, strict=True):
            meets = meets & step.meets.index_select(0, of)
        hits = places(meets.view(-1))
        v = divided(hits, max(1, n_rows))
        rows = hits - v * n_rows
        key = keys.index_select(0, rows)
        for step, of in zip(steps, which, strict=True):
            place = (of * n_rows).index_select(0, v).add_(rows)
            key += step.keys.view(-1).index_select(0, place)
        found.append((v + first, rows, key))
    v, rows, key = (torch.cat(parts) for parts in zip(*found, strict=True))
    return v, rows, key


def _coordinates(keys: torch.Tensor, box: Box) -> torch.Tensor:
    columns = []
    for low, extent in zip(reversed(box.lo), reversed(box.size), strict=True):
        above = divided(keys, extent)
        columns.append((keys - above * extent + low).int())
        keys = above
    return torch.stack(columns[::-1], 1)
