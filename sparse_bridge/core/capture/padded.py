"""Scenes with room to spare: how many rows there are stands on the device alone.

A captured graph of launches repeats addresses and sizes, but scenes differ in rows. So a scene
lies in memory for more rows than it has, all its maps are built by a `Chain` that leaves them that
large, and kernels read the number of rows of every level from the device. What lies behind the last
row is never gathered by a convolution; NaN there shows whatever else mixes rows. Training asks for
more: sums over rows are right where what lies behind is finite in features and zero in their
gradients. Maps that the scenes before were not asked for cannot be had.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..maps import rows as row_scopes
from ..maps.rows import Rows, UnknownRowsError, UnpaddedError

if TYPE_CHECKING:
    from .batched_builder import Record

__all__ = [
    "PaddedScene", "UnknownRowsError", "UnpaddedError", "current", "room_for", "rows_found",
    "using",
]  # fmt: skip

_STEPS_PER_OCTAVE = 4
_LEAST = 1024


@dataclasses.dataclass(eq=False)
class PaddedScene:
    """coords: int32 [room, 1 + D], zeros behind the last row.  count: int32 [1], one less than the
    rows there are.  record: what scenes of this grid are asked.  fill: what layers leave behind the
    last row of a result; None: anything.

    Once the maps are built: rooms, rows that each level has room for, by level; counts, by level
    like `count`; books and flags, the counters to read, see `judged`.  prepared: the maps: sides of
    every step and coordinates by level.
    """

    coords: torch.Tensor
    count: torch.Tensor
    record: Record
    fill: float | None = None
    rooms: dict[int, int] = dataclasses.field(default_factory=dict)
    counts: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    books: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()  # of the levels' counters in the books
    flags: torch.Tensor | None = None
    prepared: tuple[list[Any], dict[int, torch.Tensor]] | None = None

    def rows(self, level: int) -> Rows:
        """The rows of a level, once the maps are built."""
        return Rows(None, self.counts[level], self.rooms[level], self.fill)

    def level_of(self, value: torch.Tensor) -> int:
        """The level whose rows `value` has, room included. Raises UnknownRowsError."""
        for level, room in self.rooms.items():
            if value.ndim and value.shape[0] == room:
                return level
        raise UnknownRowsError(
            f"a tensor of shape {list(value.shape)} has not a row for every site of a level."
        )

    def judged(
        self, books: Sequence[int], flags: Sequence[int], n_rows: int
    ) -> dict[int, int] | None:
        """Rows of every level, from the values of `books` and `flags` once the kernels have run;
        None where rows are equal, lie outside, or do not fit."""
        from ...kernels.maps.hash_table import live_flags

        inserted, seen, overflow = live_flags(flags)
        if overflow or not inserted == seen == n_rows:
            return None
        deeper = {level: room for level, room in self.rooms.items() if level}
        found = rows_found(books, self.lengths, deeper)
        return None if found is None else {0: n_rows, **found}


def rows_found(
    books: Sequence[int], lengths: Sequence[int], rooms: dict[int, int]
) -> dict[int, int] | None:
    """Rows of new levels, by level, from the flags and counters of their tables, which lie one
    after another; None where one has more than there is room for.

    lengths: of the flags and counters of each.
    """
    from ...kernels.maps.hash_table import FLAGS

    found, at = {}, 0
    for (level, room), length in zip(rooms.items(), lengths, strict=True):
        _, _, overflow, last = books[at : at + FLAGS]
        at += length
        if overflow > 0 or last + 1 > room:
            return None
        found[level] = last + 1
    return found


_local = threading.local()


@contextmanager
def using(scene: PaddedScene) -> Iterator[None]:
    """Layers of this thread, given the scene's coordinates, take its maps."""
    before = getattr(_local, "scene", None)
    _local.scene = scene
    levels = sorted(scene.rooms, reverse=True)  # of equal capacities the input's own counts
    try:
        with row_scopes.scope({scene.rooms[level]: scene.rows(level) for level in levels}):
            yield
    finally:
        _local.scene = before


def current() -> PaddedScene | None:
    """The scene of this thread."""
    return getattr(_local, "scene", None)


def room_for(rows: int) -> int:
    """Rows to make room for: a few sizes per octave, so that scenes meet few."""
    step = max(_LEAST, (1 << rows.bit_length()) // (2 * _STEPS_PER_OCTAVE))
    return -(-rows // step) * step
