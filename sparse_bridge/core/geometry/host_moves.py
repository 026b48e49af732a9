"""Which cells coordinates on the host reach by kernel offsets: all offsets of a lot of rows in a
few calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .boxes import Box
from .host_cells import Array, Hull, Mask, inside, steps_of
from .offsets import Offsets

MOST_CELLS = 1 << 59  # of a box whose cells have keys here
_NOWHERE = -MOST_CELLS  # no sum with such a term, and fewer than 15 of them, is a key
_TOGETHER = 1 << 17  # rows and offsets at a time


class Rule(NamedTuple):
    """A coordinate c reaches (c * multiplier + sign * offset) / divisor where that is whole."""

    multiplier: tuple[int, ...]
    divisor: tuple[int, ...]
    sign: int


class _Moves(NamedTuple):
    """sign * offset along the axes.

    distances: int64 [D, K, 1].  counts: where the offsets are all combinations, row-major, of
    distances along the axes, how many of K each axis has; else empty, and K is all offsets.
    bounds: least and most of every axis.  disjoint: whether no two offsets meet the same row.
    """

    distances: Array
    counts: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    disjoint: bool


@functools.lru_cache(maxsize=4096)  # offsets are interned
def _moves(offsets: Offsets, rule: Rule) -> _Moves:
    columns = [tuple(rule.sign * c for c in axis) for axis in zip(*offsets.values, strict=True)]
    bounds = tuple((min(axis), max(axis)) for axis in columns)
    distinct = [tuple(dict.fromkeys(axis)) for axis in columns]
    counts: tuple[int, ...] = ()
    disjoint = False
    if list(itertools.product(*distinct)) == list(zip(*columns, strict=True)):
        counts = tuple(map(len, distinct))
        columns = [axis + axis[-1:] * (max(counts) - len(axis)) for axis in distinct]
        disjoint = set(rule.multiplier) == {1} and all(
            axis == tuple(range(axis[0], axis[0] - len(axis), -1)) and len(axis) <= step
            for axis, step in zip(distinct, rule.divisor, strict=True)
        )
    return _Moves(np.array(columns, np.int64)[:, :, None], counts, bounds, disjoint)


class Reached(NamedTuple):
    """hull: a box around the cells.  keys: int64 [P], row-major, of the cells in it.  rows, which:
    int64 [P], the row and the offset that reach them, ascending."""

    hull: Hull
    keys: Array
    rows: Array
    which: Array


def reached(columns: Array, hull: Hull | None, offsets: Offsets, rule: Rule, box: Box) -> Reached:
    """What coordinates int64 [1 + D, N], of which `hull` is a box around, reach in `box`, by row
    and then by offset."""
    moves = _moves(offsets, rule)
    out, clipped = (None, False) if hull is None else _behind(hull, moves, rule, box)
    if out is None:
        none = np.empty(0, np.int64)
        return Reached(Hull(box.lo, (1,) * len(box.lo)), none, none, none)
    of_batch, *steps = steps_of(out.size)
    batch = columns[0] - out.lo[0]
    batch *= of_batch
    if clipped:
        batch[~inside(columns[:1], out.lo[:1], out.size[:1])] = _NOWHERE
    # Cells count from the hull's first one.
    first = [low * step for low, step in zip(out.lo[1:], rule.divisor, strict=True)]
    sizes = out.size[1:] if clipped else None
    if moves.disjoint:
        return Reached(out, *_one_each(columns[1:], batch, moves, rule, first, steps, sizes))
    distances, n_rows, n_offsets = moves.distances - _upright(first), len(batch), len(offsets)
    keys, positions, lot = [], [], max(1, _TOGETHER // n_offsets)
    for begin in range(0, n_rows, lot):
        part = slice(begin, begin + lot)
        terms = _terms(columns[1:, part], distances, rule, steps, sizes)
        every = _sums(batch[part], terms, moves.counts)
        hits = np.flatnonzero(every >= 0)
        keys.append(every.take(hits))
        positions.append(hits + begin * n_offsets if begin else hits)
    key, index = (part[0] if len(part) == 1 else np.concatenate(part) for part in (keys, positions))
    rows = index // n_offsets
    return Reached(out, key, rows, index - rows * n_offsets)


def _one_each(
    columns: Array,
    batch: Array,
    moves: _Moves,
    rule: Rule,
    first: Sequence[int],
    steps: Sequence[int],
    sizes: Sequence[int] | None,
) -> tuple[Array, Array, Array]:
    """(keys, rows, which) of rows [D, N] that meet one offset each at most: what is left of a
    division tells which."""
    furthest = [most - low for (_, most), low in zip(moves.bounds, first, strict=True)]
    moved = columns + np.array(furthest, np.int64)[:, None]
    divisor = _divisor(rule)
    divisor = divisor if isinstance(divisor, int) else divisor[:, 0]
    cells = moved // divisor
    moved -= cells * divisor
    key = np.matmul(np.array(steps, np.int64), cells)
    key += batch
    which = np.matmul(np.array(steps_of(moves.counts), np.int64), moved)
    meets = None if sizes is None else _below(cells, sizes) & (batch >= 0)
    if moves.counts != rule.divisor:
        exact = _below(moved, moves.counts)
        meets = exact if meets is None else meets & exact
    if meets is None:
        return key, np.arange(len(key)), which
    rows = np.flatnonzero(meets)
    return key.take(rows), rows, which.take(rows)


def _upright(values: Sequence[int]) -> Array:
    return np.array(values, np.int64)[:, None, None]


def _below(values: Array, most: Sequence[int]) -> Mask:
    """bool [N]: which of values [D, N] are 0 <= value < most in all columns."""
    fits = values.view(np.uint64) < np.array(most, np.uint64)[:, None]
    every: Mask = np.logical_and.reduce(fits, 0)
    return every


def _divisor(rule: Rule) -> Array | int:
    """[D, 1, 1], or one for all axes, by which numpy divides faster."""
    return rule.divisor[0] if len(set(rule.divisor)) == 1 else _upright(rule.divisor)


def _behind(hull: Hull, moves: _Moves, rule: Rule, box: Box) -> tuple[Hull | None, bool]:
    """(the box that cells of `hull` may reach in `box`, None if there is none; whether some may be
    reached beyond it)."""
    ends = [(hull.lo[0], hull.lo[0] + hull.size[0])]
    spans = zip(hull.lo[1:], hull.size[1:], moves.bounds, rule.multiplier, rule.divisor, strict=True)
    for low, size, (least, most), times, step in spans:
        begin, last = low * times + least, (low + size - 1) * times + most
        ends.append((-(-begin // step), last // step + 1))
    lo, sizes, clipped = [], [], False
    for (begin, end), low, size in zip(ends, box.lo, box.size, strict=True):
        clipped = clipped or begin < low or end > low + size
        begin, end = max(begin, low), min(end, low + size)
        if begin >= end:
            return None, True
        lo.append(begin)
        sizes.append(end - begin)
    return Hull(lo, sizes), clipped


def _terms(columns: Array, distances: Array, rule: Rule, steps: Sequence[int], sizes: Sequence[int] | None) -> Array:
    """int64 [D, K, N]: the part of a cell's key that each axis gives, by every distance."""
    columns = columns[:, None]
    if rule.multiplier != (1,) * len(columns):
        columns = columns * _upright(rule.multiplier)
    cells = columns + distances
    beyond = None
    if rule.divisor != (1,) * len(columns):
        divisor = _divisor(rule)
        moved, cells = cells, cells // divisor
        moved -= cells * divisor
        beyond = moved != 0
    if sizes is not None:
        outside = cells.view(np.uint64) >= _upright(sizes).view(np.uint64)
        beyond = outside if beyond is None else beyond | outside
    cells *= _upright(steps)
    if beyond is not None:
        np.copyto(cells, _NOWHERE, where=beyond)
    return cells


def _sums(batch: Array, terms: Array, counts: tuple[int, ...]) -> Array:
    """int64 [N * V]: the key of what every row reaches by every offset, negative where that is
    nothing."""
    keys: Array
    if not counts:
        keys = terms.sum(0) + batch
    else:
        keys = batch[None]
        for term, count in zip(terms, counts, strict=True):
            keys = (keys[:, None] + term[:count]).reshape(-1, len(batch))
    # Rows go last up to here: numpy is slow where the last axis is short.
    flat: Array = keys.T.ravel()
    return flat
