"""Coordinate look-up and map building by numpy: the CPU's way, and any device's where Triton does
not run, whose coordinates come to the host for it.

A sorted array of int64 keys, or a table of all cells where these are few, takes the place of the
GPU's hash table. Pair lists come out directly; neighbour tables are derived from them only when
something asks. Scenes of some hundred rows are bound by the number of calls: all offsets are looked
up together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ..geometry.boxes import Box
from ..geometry.host_cells import (
    Array,
    Hull,
    Mask,
    columns_of,
    fits,
    halo_of,
    hull_of,
    inside,
    keys_of,
    on_device,
    on_host,
    values_of,
)
from ..geometry.offsets import Offsets
from .host_integers import differs, joined, leaders, runs, search, sort_keys

_MET = 1 << 22  # offsets and rows that are compared at a time
_LOOKED_UP = 1 << 17  # offsets and rows that are looked up at a time
_CELLS = 1 << 22  # of a table, at most
_FEW = 1 << 15  # cells that a table may always have
_SHARE = 16  # cells for which a look-up pays


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


class HostIndex:
    """Live, distinct coordinates in key order.

    rows: int64 [U], the first row of each, of those in `every` [N, 1 + D].  hull: a box that holds
    them all.
    """

    def __init__(self, every: torch.Tensor, rows: torch.Tensor, hull: Hull | Box) -> None:
        self._every, self.rows = every, rows
        self.hull = Hull(hull.lo, hull.size)
        self._sorted: dict[tuple[int, ...], Array] = {}

    @functools.cached_property
    def coords(self) -> torch.Tensor:
        """The coordinates [U, 1 + D]."""
        return self._every.index_select(0, self.rows)

    def keys(self, halo: tuple[int, ...]) -> Array:
        """Ascending keys of the hull widened by `halo`; the order does not depend on the halo."""
        found = self._sorted.get(halo)
        if found is None:
            found = keys_of(columns_of(self.coords), self.hull, halo)
            if len(self._sorted) > 8:
                self._sorted.clear()
            self._sorted[halo] = found
        return found

    def steps(self, offsets: Offsets, halo: tuple[int, ...]) -> Array:
        """What each offset adds to such a key: int64 [V]."""
        step = np.zeros(len(offsets), np.int64)
        for extent, reach, column in zip(self.hull.size[1:], halo, values_of(offsets), strict=True):
            step *= extent + 2 * reach
            step += column
        return step

    def find(
        self, query: Array, steps: Array, halo: tuple[int, ...]
    ) -> tuple[Array, Array, list[int]]:
        """(rows at query + step, places of these queries, starts), by step and then by place; those
        of step s are [starts[s] : starts[s + 1]]."""
        n_cells = self.hull.size[0]
        for extent, reach in zip(self.hull.size[1:], halo, strict=True):
            n_cells *= extent + 2 * reach
        n_steps, n_queries = len(steps), len(query)
        as_table = n_cells <= _table_size(n_steps * n_queries)
        look_up = self._by_table(n_cells, halo) if as_table else self._by_search(halo)
        rows, places, starts = [], [], [0]
        together = max(1, (_LOOKED_UP if as_table else _MET) // max(1, n_queries))
        for first in range(0, n_steps, together):
            found, hits = look_up(query, steps[first : first + together])
            bounds = np.arange(min(together, n_steps - first) + 1) * n_queries
            ends = hits.searchsorted(bounds)
            hits -= bounds[:-1].repeat(ends[1:] - ends[:-1])
            rows.append(found)
            places.append(hits)
            starts += (ends[1:] + starts[-1]).tolist()
        return joined(rows), joined(places), starts

    def _by_table(self, n_cells: int, halo: tuple[int, ...]) -> _LookUp:
        """Of queries and steps (rows found, places in the matrix of all their sums)."""
        table = np.full(n_cells, -1, np.int32)
        table[self.keys(halo)] = on_host(self.rows)

        def look_up(query: Array, steps: Array) -> tuple[Array, Array]:
            # What leaves the table comes in at its other end, where the halo's cells are empty.
            found = table.take(query + steps[:, None], mode="wrap").ravel()
            hits = np.flatnonzero(found >= 0)
            return found.take(hits).astype(np.int64), hits

        return look_up

    def _by_search(self, halo: tuple[int, ...]) -> _LookUp:
        """The same. Steps that differ by one (neighbours along the last axis) take one search
        together: the place of the next key is this one's, plus one if it was present (the one-shot
        search of Spira, MLSys 2026).
        """
        keys = np.append(self.keys(halo), np.iinfo(np.int64).max)
        rows: Array = on_host(self.rows)

        def look_up(query: Array, steps: Array) -> tuple[Array, Array]:
            order = steps.argsort()
            place = np.empty((len(steps), len(query)), np.int64)
            present = np.empty(place.shape, np.bool_)
            for at, previous in runs(steps[order]):
                wanted = query + steps[order[at], None]
                if previous is None:
                    found = search(keys, wanted)
                else:
                    before = order[previous]
                    found = place[before] + present[before]
                place[order[at]] = found
                present[order[at]] = keys.take(found) == wanted
            hits = np.flatnonzero(present)
            return rows.take(place.ravel().take(hits)), hits

        return look_up


_LookUp = Callable[[Array, Array], tuple[Array, Array]]


def _table_size(n_look_ups: int) -> int:
    """Cells up to which a table pays for so many look-ups."""
    return min(_CELLS, max(_FEW, _SHARE * n_look_ups))


class Indexed:
    """index, plus what was seen on the way: alive int32 [N] (row or -1; None if all live), and
    whether the live rows are distinct."""

    def __init__(
        self, index: HostIndex, alive: torch.Tensor | None, unique: bool,
        inverse: Callable[[], torch.Tensor],
    ) -> None:  # fmt: skip
        self.index, self.alive, self.unique, self._inverse = index, alive, unique, inverse

    @functools.cached_property
    def inverse(self) -> torch.Tensor:
        """int64 [N], the sorted place of each row's coordinate, -1 if dead."""
        return self._inverse()


def build(coords: torch.Tensor, box: Box) -> Indexed:
    """Index the rows of `coords` [N, 1 + D] that lie in `box`; of equal coordinates the first row
    counts."""
    device, columns = coords.device, columns_of(coords)
    hull, live, alive = hull_of(columns), None, None
    if hull is not None and not fits(hull, box):
        live = np.flatnonzero(inside(columns, box.lo, box.size))
        columns = columns[:, live]
        hull = hull_of(columns)
        dead_or_not = np.full(coords.shape[0], -1, np.int32)
        dead_or_not[live] = 0
        alive = on_device(dead_or_not, device)
    hull = Hull(box.lo, box.size) if hull is None else hull
    keys, order = sort_keys(keys_of(columns, hull, (0,) * box.dimension), math.prod(hull.size))
    every = order if live is None else live[order]
    first = differs(keys)
    unique = bool(first.all())
    rows = on_device(every if unique else every[first], device)

    def inverse() -> torch.Tensor:
        place = np.full(coords.shape[0], -1, np.int64)
        place[every] = first.cumsum() - 1
        return on_device(place, device)

    return Indexed(HostIndex(coords, rows, hull), alive, unique, inverse)


def submanifold(index: HostIndex, offsets: Offsets, n_rows: int, keep_center: bool) -> PairLists:
    """Pairs among the rows of `index`; symmetric offsets are looked up by half and mirrored.

    keep_center: pair every one of the `n_rows` rows with itself at the zero offset (dead rows too),
    else none.
    """
    halo, rows = halo_of(offsets), on_host(index.rows)
    mirrored, center = offsets.symmetric, offsets.center
    steps = index.steps(offsets, halo)[: len(offsets) // 2 + 1 if mirrored else None]
    if center >= 0:
        steps = np.delete(steps, center)
    in_rows, hits, starts = index.find(index.keys(halo), steps, halo)
    out_rows = rows.take(hits)
    if center >= 0:
        every, at = np.arange(n_rows if keep_center else 0), starts[center]
        in_rows = np.concatenate([in_rows[:at], every, in_rows[at:]])
        out_rows = np.concatenate([out_rows[:at], every, out_rows[at:]])
        starts = [*starts[: center + 1], *(start + len(every) for start in starts[center:])]
    device = index.rows.device
    return PairLists(on_device(in_rows, device), on_device(out_rows, device), starts, mirrored)


def lookup(
    index: HostIndex,
    coords: torch.Tensor,
    alive: torch.Tensor | None,
    offsets: Offsets,
    stride: tuple[int, ...],
) -> PairLists:
    """Pairs (row of `index`, row of `coords`): coordinate * stride + offset, for every offset."""
    device, halo, hull = coords.device, halo_of(offsets), index.hull
    columns = columns_of(coords)
    for column, step in zip(columns[1:], stride, strict=True):
        column *= step
    low = [hull.lo[0], *(low - reach for low, reach in zip(hull.lo[1:], halo, strict=True))]
    size = [hull.size[0], *(n + 2 * reach for n, reach in zip(hull.size[1:], halo, strict=True))]
    here = inside(columns, low, size)
    if alive is not None:
        here &= on_host(alive) >= 0
    rows = np.flatnonzero(here)
    query = keys_of(columns[:, rows], hull, halo)
    in_rows, hits, starts = index.find(query, index.steps(offsets, halo), halo)
    return PairLists(on_device(in_rows, device), on_device(rows.take(hits), device), starts, False)


def expand(
    coords: torch.Tensor, alive: torch.Tensor | None, offsets: Offsets, multiplier: tuple[int, ...],
    divisor: tuple[int, ...], sign: int, out_box: Box,
) -> tuple[torch.Tensor, PairLists]:  # fmt: skip
    """New coordinates (c * multiplier + sign * offset) / divisor that are whole and lie in
    `out_box`.

    Returns them ([M, 1 + D] int32, ordered by the first row of `coords` that reaches each, then by
    offset) and the pairs (row of coords, new row). Rows of `coords` must be distinct.
    """
    columns, n_rows, n_offsets = columns_of(coords), coords.shape[0], len(offsets)
    moves = _moves(offsets, multiplier, divisor, sign)
    cells, meets = _moved(columns, moves, out_box)
    base = inside(columns[:1], out_box.lo[:1], out_box.size[:1])
    if alive is not None:
        base &= on_host(alive) >= 0
    v, in_rows = _reached(base, meets, moves.which)
    reached = np.empty((len(columns), len(v)), np.int64)
    columns[0].take(in_rows, out=reached[0])
    cells.take(moves.which.take(v, axis=1) * n_rows + in_rows, out=reached[1:])
    hull = hull_of(reached) or Hull(out_box.lo, out_box.size)
    keys, n_cells = keys_of(reached, hull, (0,) * out_box.dimension), math.prod(hull.size)
    # In the order of discoverers: a coordinate's is the smallest (row, offset) that reaches it.
    order = sort_keys(in_rows * n_offsets + v, n_rows * n_offsets)[1]
    lead = leaders(keys.take(order), n_cells, n_cells <= _table_size(len(keys)))
    first = lead == np.arange(len(lead))
    out_rows = np.empty_like(lead)
    out_rows[order] = (first.cumsum() - 1).take(lead)
    new = reached.take(order[first], axis=1).T.astype(np.int32, order="C")
    starts = v.searchsorted(np.arange(n_offsets + 1)).tolist()
    device = coords.device
    pairs = PairLists(on_device(in_rows, device), on_device(out_rows, device), starts, False)
    return on_device(new, device), pairs


class _Moves(NamedTuple):
    """The distinct moves [S] of offsets along the axes.

    axis, multiplier, distance: of each.  divisor: of each, or of all.  which: [D, V], the move of
    an offset along an axis.
    """

    axis: Array
    multiplier: Array
    distance: Array
    divisor: Array | int
    which: Array


@functools.lru_cache(maxsize=4096)  # offsets are interned
def _moves(
    offsets: Offsets, multiplier: tuple[int, ...], divisor: tuple[int, ...], sign: int
) -> _Moves:
    axes, distances, which, n_moves = [], [], [], 0
    for axis, column in enumerate(values_of(offsets)):
        found, place = np.unique(sign * column, return_inverse=True)
        axes.append(np.full(len(found), axis))
        distances.append(found[:, None])
        which.append(place + n_moves)
        n_moves += len(found)
    of = np.concatenate(axes)
    steps = np.array(divisor)[of, None] if len(set(divisor)) > 1 else divisor[0]
    multiples = np.array(multiplier)[of, None]
    return _Moves(of, multiples, np.concatenate(distances), steps, np.stack(which))


def _moved(columns: Array, moves: _Moves, box: Box) -> tuple[Array, Mask]:
    """Where rows go by every move, int64 [S, N], and whether that is whole and in `box`."""
    moved = columns[1:].take(moves.axis, axis=0)
    moved *= moves.multiplier
    moved += moves.distance
    low, size = (np.array(ends[1:]).take(moves.axis)[:, None] for ends in (box.lo, box.size))
    if isinstance(moves.divisor, int) and moves.divisor == 1:
        return moved, (moved >= low) & (moved < low + size)
    cells = moved // moves.divisor
    return cells, (cells >= low) & (cells < low + size) & (cells * moves.divisor == moved)


def _reached(base: Mask, meets: Mask, which: Array) -> tuple[Array, Array]:
    """(offset, row) int64 of every cell that a row with `base` set reaches by the moves `which`
    that meet cells, by offset and then by row."""
    n_offsets, n_rows = which.shape[1], len(base)
    offsets, rows = [], []
    together = max(1, _MET // max(1, n_rows))
    for first in range(0, n_offsets, together):
        every = base
        for own in which[:, first : first + together]:
            every = every & meets.take(own, axis=0)
        hits, bounds = np.flatnonzero(every), np.arange(len(every) + 1) * n_rows
        ends = hits.searchsorted(bounds)
        counts = ends[1:] - ends[:-1]
        offsets.append(np.arange(first, first + len(every)).repeat(counts))
        rows.append(hits - bounds[:-1].repeat(counts))
    return joined(offsets), joined(rows)
