"""Coordinate look-up and map building by numpy: the CPU's way, and any device's where Triton does
not run, whose coordinates come to the host for it.

A sorted array of int64 keys, or a table of all cells where these are few, takes the place of the
GPU's hash table. Pair lists come out directly; neighbour tables are derived from them only when
something asks. Scenes of some hundred rows are bound by the number of calls: all offsets are looked
up together.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ..geometry.boxes import Box
from ..geometry.host_cells import (
    Array,
    Hull,
    Mask,
    Rows32,
    cells_of,
    columns_of,
    fits,
    halo_of,
    hull_of,
    inside,
    keys_of,
    on_device,
    on_host,
    steps_of,
    values_of,
)
from ..geometry.host_moves import Rule, reached
from ..geometry.offsets import Offsets
from .host_integers import differs, leaders, runs, search, sort_keys, stable_order
from .pair_lists import PairLists, ShortPairs

_MET = 1 << 22  # offsets and rows that are compared at a time
_LOOKED_UP = 1 << 17  # offsets and rows that are looked up at a time
_CELLS = 1 << 22  # of a table, at most
_FEW = 1 << 15  # cells that a table may always have
_SHARE = 16  # cells for which a look-up pays


class HostIndex:
    """Live, distinct coordinates in key order.

    rows: int64 [U], the first row of each, of those in `every` [N, 1 + D]; on_host: the same
    there.  hull: a box that holds them all.
    """

    def __init__(self, every: torch.Tensor, rows: torch.Tensor, hull: Hull | Box) -> None:
        self._every, self.rows = every, rows
        self.hull = Hull(hull.lo, hull.size)
        self._sorted: dict[tuple[int, ...], Array] = {}

    @functools.cached_property
    def on_host(self) -> Array:
        """`rows` in host memory, int64 [U]."""
        return on_host(self.rows)

    @functools.cached_property
    def coords(self) -> torch.Tensor:
        """The coordinates [U, 1 + D], in the dtype of `every` (int32 of a coordinate map's)."""
        return self._every.index_select(0, self.rows)

    def keep(self, halo: tuple[int, ...], keys: Array) -> None:
        """Remember the answer of `keys`."""
        if len(self._sorted) > 8:
            self._sorted.clear()
        self._sorted[halo] = keys

    def keys(self, halo: tuple[int, ...]) -> Array:
        """Ascending keys of the hull widened by `halo`; the order does not depend on the halo."""
        keys = self._sorted.get(halo)
        if keys is None:
            keys = keys_of(columns_of(self.coords), self.hull, halo)
            self.keep(halo, keys)
        return keys

    def steps(self, values: Array, halo: tuple[int, ...]) -> Array:
        """What offsets `values` [D, V] add to such a key: int64 [V]."""
        sizes = [n + 2 * reach for n, reach in zip(self.hull.size[1:], halo, strict=True)]
        steps: Array = np.matmul(np.array(steps_of(sizes), np.int64), values)
        return steps

    def find(self, query: Array, steps: Array, halo: tuple[int, ...]) -> tuple[Rows32, Array, list[int]]:
        """(rows at query + step, places of these queries, how many of every step), by step and then
        by place."""
        n_cells = cells_of(self.hull, halo)
        n_steps, n_queries = len(steps), len(query)
        as_table = n_cells <= _table_size(n_steps * n_queries)
        look_up = self._by_table(n_cells, halo) if as_table else self._by_search(halo)
        rows, positions, counts = [], [], []
        together = max(1, (_LOOKED_UP if as_table else _MET) // max(1, n_queries))
        for first in range(0, n_steps, together):
            hit_rows, hits = look_up(query, steps[first : first + together])
            bounds = np.arange(min(together, n_steps - first) + 1) * n_queries
            ends = hits.searchsorted(bounds)
            counted = ends[1:] - ends[:-1]
            hits -= bounds[:-1].repeat(counted)
            rows.append(hit_rows)
            positions.append(hits)
            counts += counted.tolist()
        if len(rows) == 1:
            return rows[0], positions[0], counts
        return (
            np.concatenate([np.empty(0, np.int32), *rows]),
            np.concatenate([np.empty(0, np.int64), *positions]),
            counts,
        )

    def _by_table(self, n_cells: int, halo: tuple[int, ...]) -> _LookUp:
        """Of queries and steps (rows found, places in the matrix of all their sums)."""
        table = np.full(n_cells, -1, np.int32)
        table[self.keys(halo)] = self.on_host

        def look_up(query: Array, steps: Array) -> tuple[Rows32, Array]:
            # What leaves the table comes in at its other end, where the halo's cells are empty.
            rows = table.take(query + steps[:, None], mode="wrap").ravel()
            hits = np.flatnonzero(rows >= 0)
            return rows.take(hits), hits

        return look_up

    def _by_search(self, halo: tuple[int, ...]) -> _LookUp:
        """The same. Steps that differ by one (neighbours along the last axis) take one search
        together: the place of the next key is this one's, plus one if it was present (the one-shot
        search of Spira, MLSys 2026).
        """
        keys = np.append(self.keys(halo), np.iinfo(np.int64).max)
        rows: Rows32 = self.on_host.astype(np.int32)

        def look_up(query: Array, steps: Array) -> tuple[Rows32, Array]:
            order = steps.argsort()
            position = np.empty((len(steps), len(query)), np.int64)
            present = np.empty(position.shape, np.bool_)
            for at, previous in runs(steps[order]):
                targets = query + steps[order[at], None]
                if previous is None:
                    first = search(keys, targets)
                else:
                    earlier = order[previous]
                    first = position[earlier] + present[earlier]
                position[order[at]] = first
                present[order[at]] = keys.take(first) == targets
            hits = np.flatnonzero(present)
            return rows.take(position.ravel().take(hits)), hits

        return look_up


_LookUp = Callable[[Array, Array], tuple[Rows32, Array]]


def _table_size(n_look_ups: int) -> int:
    """Cells up to which a table pays for so many look-ups."""
    return min(_CELLS, max(_FEW, _SHARE * n_look_ups))


class Indexed:
    """The rows of `coords` [N, 1 + D], of which those in `box` are live, and their index, made when
    it is asked for; of equal coordinates the first row counts.

    alive: int32 [N], -1 for dead rows; None if all are live.  live: the rows that are, None if all.
    hull: the smallest box around them, None if there are none.
    """

    def __init__(self, coords: torch.Tensor, box: Box) -> None:
        self.coords, self.box = coords, box
        self.live: Array | None = None
        self.alive: torch.Tensor | None = None
        columns = columns_of(coords)
        self.hull = hull_of(columns)
        if self.hull is not None and not fits(self.hull, box):
            live = self.live = np.flatnonzero(inside(columns, box.lo, box.size))
            columns = columns[:, live]
            self.hull = hull_of(columns)
            dead_or_not = np.full(coords.shape[0], -1, np.int32)
            dead_or_not[live] = 0
            self.alive = on_device(dead_or_not, coords.device)
        self.columns = columns

    @functools.cached_property
    def columns(self) -> Array:
        """int64 [1 + D, L], the live coordinates."""
        columns = columns_of(self.coords)
        return columns if self.live is None else columns[:, self.live]

    @functools.cached_property
    def unique(self) -> bool:
        """Whether live rows are distinct."""
        if self.hull is None:
            return True
        n_rows, n_cells = self.columns.shape[1], math.prod(self.hull.size)
        if "_ordered" in self.__dict__ or n_cells > _table_size(n_rows):
            return self._ordered.unique
        steps = np.array(steps_of(self.hull.size), np.int64)
        keys = np.matmul(steps, self.columns)
        keys -= sum(map(operator.mul, steps.tolist(), self.hull.lo))
        rows, last = np.arange(n_rows), np.empty(n_cells, np.int64)
        last[keys] = rows
        return bool((last.take(keys) == rows).all())

    @functools.cached_property
    def _ordered(self) -> _Ordered:
        """The rows by keys of the hull, with the halo of most kernels if they have room for it."""
        columns = self.__dict__.pop("columns", None)  # from here on the index serves
        columns = self.columns if columns is None else columns
        hull, halo = self.hull or Hull(self.box.lo, self.box.size), (1,) * self.box.dimension
        n_cells = cells_of(hull, halo)
        if n_cells >= 1 << 62:
            halo = (0,) * len(halo)
            n_cells = cells_of(hull, halo)
        keys, order = sort_keys(keys_of(columns, hull, halo), n_cells)
        rows = order if self.live is None else self.live[order]
        first = differs(keys)
        unique, leaders_of = bool(first.all()), rows
        if not unique:
            keys, leaders_of = keys[first], rows[first]
        index = HostIndex(self.coords, on_device(leaders_of, self.coords.device), hull)
        index.keep(halo, keys)
        return _Ordered(index, unique, rows, first)

    @property
    def index(self) -> HostIndex:
        """The distinct live coordinates in key order."""
        return self._ordered.host_index

    @functools.cached_property
    def inverse(self) -> torch.Tensor:
        """int64 [N], the sorted place of each row's coordinate, -1 if dead."""
        rank = np.full(self.coords.shape[0], -1, np.int64)
        rank[self._ordered.rows] = self._ordered.first.cumsum() - 1
        return on_device(rank, self.coords.device)


class _Ordered(NamedTuple):
    """rows: the live ones by coordinate and then by row.  first: which of them are the first of
    theirs."""

    host_index: HostIndex
    unique: bool
    rows: Array
    first: Mask


def submanifold(index: HostIndex, offsets: Offsets, n_rows: int) -> PairLists:
    """Pairs among the rows of `index`, at the zero offset every one of the `n_rows` rows with
    itself (dead rows too); symmetric offsets are looked up by half and mirrored."""
    halo, center = halo_of(offsets), offsets.center
    steps = index.steps(_looked_up(offsets), halo)
    in_rows, positions, counts = index.find(index.keys(halo), steps, halo)
    out_rows = index.on_host.take(positions).astype(np.int32)
    if center >= 0:
        counts.insert(center, 0)
    pairs = ShortPairs(in_rows, out_rows, counts, center, n_rows)
    return PairLists.of(pairs, offsets.symmetric, index.rows.device)


@functools.lru_cache(maxsize=4096)  # offsets are interned
def _looked_up(offsets: Offsets) -> Array:
    """int64 [D, L], the offsets of a submanifold map whose rows have to be looked up."""
    last = len(offsets) // 2 + 1 if offsets.symmetric else len(offsets)
    values = [value for v, value in enumerate(offsets.values[:last]) if v != offsets.center]
    columns: Array = np.array(values, np.int64).reshape(len(values), offsets.dimension).T.copy()
    return columns


def lookup(
    index: HostIndex, coords: torch.Tensor, alive: torch.Tensor | None, offsets: Offsets, stride: tuple[int, ...]
) -> PairLists:
    """Pairs (row of `index`, row of `coords` int32 [N, 1 + D]): coordinate * stride + offset, for every offset. alive:
    int32 [N], negative for rows that find nothing."""
    device, halo, hull = coords.device, halo_of(offsets), index.hull
    columns = columns_of(coords)
    for column, step in zip(columns[1:], stride, strict=True):
        column *= step
    low = [hull.lo[0], *(low - reach for low, reach in zip(hull.lo[1:], halo, strict=True))]
    size = [hull.size[0], *(n + 2 * reach for n, reach in zip(hull.size[1:], halo, strict=True))]
    mask = inside(columns, low, size)
    if alive is not None:
        mask &= on_host(alive) >= 0
    rows = np.flatnonzero(mask)
    query = keys_of(columns[:, rows], hull, halo)
    in_rows, positions, counts = index.find(query, index.steps(values_of(offsets), halo), halo)
    pairs = ShortPairs(in_rows, rows.take(positions).astype(np.int32), counts)
    return PairLists.of(pairs, False, device)


def expand(indexed: Indexed, offsets: Offsets, rule: Rule, out_box: Box, order: str) -> tuple[torch.Tensor, PairLists]:
    """New coordinates (c * multiplier + sign * offset) / divisor that are whole and lie in
    `out_box`, of the live coordinates c of `indexed`, which must be distinct.

    Returns them ([M, 1 + D] int32, in `order`, see `MapRequest`) and the pairs (row, new row).
    """
    n_offsets, device = len(offsets), indexed.coords.device
    hull, keys, in_rows, which = reached(indexed.columns, indexed.hull, offsets, rule, out_box)
    n_cells = math.prod(hull.size)
    # In the order of discoverers: a coordinate's is the first row and offset that reaches it.
    lead = leaders(keys, n_cells, n_cells <= _table_size(len(keys)))
    first = lead == np.arange(len(lead))
    new_keys = keys[first]
    cells = np.array(np.unravel_index(new_keys, tuple(hull.size)))
    if indexed.live is not None:
        in_rows = indexed.live.take(in_rows)
    by_offset = stable_order(which, n_offsets)
    out_rows = first.cumsum(dtype=np.int32).take(lead.take(by_offset)) - np.int32(1)
    if order != "first_seen":
        rows = _rows_in(order, new_keys, cells, hull, out_rows)
        cells, rank = cells[:, rows], np.empty(len(rows), np.int32)
        rank[rows] = np.arange(len(rows))
        out_rows = rank.take(out_rows)
    cells += np.array(hull.lo)[:, None]
    new = cells.T.astype(np.int32, order="C")
    counts = np.bincount(which, minlength=n_offsets).tolist()
    pairs = ShortPairs(in_rows.take(by_offset).astype(np.int32), out_rows, counts)
    return on_device(new, device), PairLists.of(pairs, False, device)


def _rows_in(order: str, keys: Array, cells: Array, hull: Hull, out_rows: Rows32) -> Array:
    """New rows in an order that is not "first_seen", see `MapRequest`.

    keys, cells: of the new rows, row-major in the hull, and [1 + D, M] from its first cell.
    out_rows: of all pairs, by offset and then by input row.
    """
    if order == "by_offset":
        pairs = np.arange(len(out_rows))
        keys = np.empty(len(keys), np.int64)
        keys[out_rows[::-1]] = pairs[::-1]  # the first pair of a row is the last one written
        return sort_keys(keys, len(pairs))[1]
    if order == "sorted":
        axes = [0, *range(len(cells) - 1, 0, -1)]
        steps = steps_of([hull.size[axis] for axis in axes])
        keys = np.matmul(np.array(steps, np.int64), cells[axes])
    return sort_keys(keys, math.prod(hull.size))[1]
