"""Scenes with room to spare: how many rows there are stands on the device alone.

A captured graph of launches repeats addresses and sizes, but scenes differ in rows. So a scene
lies in memory for more rows than it has, all its maps are built by a `Chain` that leaves them that
large, and kernels read the number of rows of every level from the device. What lies behind the last
row is never gathered by a convolution; `poison` makes it NaN, so that whatever else mixes rows
shows. Maps that the scenes before were not asked for cannot be had.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from .map_chain import Record

__all__ = ["PaddedScene", "UnpaddedError", "current", "forbid", "room_for", "using"]

_STEPS_PER_OCTAVE = 4
_LEAST = 1024


class UnpaddedError(UnsupportedError):
    """Something that needs the number of rows on the host."""


@dataclasses.dataclass(eq=False)
class PaddedScene:
    """coords: int32 [room, 1 + D], zeros behind the last row.  count: int32 [1], one less than the
    rows there are.  record: what scenes of this grid are asked.  poison: see the module's text.

    Once the maps are built: rooms, rows that each level has room for, by level; books and flags,
    the counters to read, see `rows`.
    """

    coords: torch.Tensor
    count: torch.Tensor
    record: Record
    poison: bool = False
    rooms: dict[int, int] = dataclasses.field(default_factory=dict)
    books: torch.Tensor | None = None
    places: tuple[int, ...] = ()  # of the levels' counters in the books
    flags: torch.Tensor | None = None

    @property
    def room(self) -> int:
        return self.coords.shape[0]

    def rows(self, n_rows: int) -> dict[int, int] | None:
        """Rows of every level, once the kernels have run, which this waits for; None where rows are
        equal, lie outside, or do not fit."""
        from ..kernels.hash_table import FLAGS, Fetched, live_flags

        assert self.books is not None and self.flags is not None
        books, flags = Fetched([self.books, self.flags]).read()
        inserted, seen, overflow = live_flags(flags)
        if overflow or not inserted == seen == n_rows:
            return None
        found = {0: n_rows}
        levels = [level for level in self.rooms if level]
        for level, place in zip(levels, self.places, strict=True):
            _, _, lost, last = books[place : place + FLAGS]
            if lost > 0 or last + 1 > self.rooms[level]:
                return None
            found[level] = last + 1
        return found


_local = threading.local()
active = 0  # scenes in use in all threads; layers look at the thread only where there are any
_lock = threading.Lock()


@contextmanager
def using(scene: PaddedScene) -> Iterator[None]:
    """Layers of this thread, given the scene's coordinates, take its maps."""
    global active
    before = getattr(_local, "scene", None)
    with _lock:
        active += 1
    _local.scene = scene
    try:
        yield
    finally:
        _local.scene = before
        with _lock:
            active -= 1


def current() -> PaddedScene | None:
    """The scene of this thread."""
    return getattr(_local, "scene", None) if active else None


def forbid(what: str) -> None:
    """Raise UnpaddedError where the rows of this thread's scene are padded."""
    if active and current() is not None:
        raise UnpaddedError(f"{what} needs to know the number of rows.")


def fresh(shape: tuple[int, int], like: torch.Tensor) -> Any:
    """Memory for a layer's result."""
    scene = current()
    y = like.new_empty(shape)
    return y.fill_(float("nan")) if scene is not None and scene.poison else y


def room_for(rows: int) -> int:
    """Rows to make room for: a few sizes per octave, so that scenes meet few."""
    step = max(_LEAST, (1 << rows.bit_length()) // (2 * _STEPS_PER_OCTAVE))
    return -(-rows // step) * step
