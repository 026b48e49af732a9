"""Boxes of coordinates: what a coordinate map may hold, and where kernels read how coordinates
become keys.

Bounds are values on the device and no part of a kernel, so that scenes of any shape run the same
launches. All boxes of a scene travel together, and nobody waits for them.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import GeometryError, OverflowLimitError
from ...kernels.runtime.parts import Part
from ...kernels.runtime.target import current_stream
from ...kernels.runtime.uploads import check_uploads, uploaded

if TYPE_CHECKING:
    from .offsets import Offsets

_INT32 = 1 << 31


class ExtentError(GeometryError, RuntimeError):
    """A grid with a negative extent."""


class Box:
    """Coordinates a map may hold: lo <= coordinate < lo + size per column, batch first.

    Interned by value. Keys of the box are row-major indices, int32 when they fit.  furthest: the
    largest absolute end of a column.  key64: keys do not fit.  oversized: too large for row-major
    keys: searched by whole coordinates; only from `spanning`.
    """

    __slots__ = (
        "__weakref__",
        "_steps",
        "dimension",
        "furthest",
        "key64",
        "layouts",
        "lo",
        "oversized",
        "size",
        "volume",
    )

    def __init__(self, lo: tuple[int, ...], size: tuple[int, ...]) -> None:
        self.lo, self.size = lo, size
        volume = 1
        for extent in size:
            volume *= extent
        self.volume = volume
        self.dimension = len(size) - 1
        self.furthest = max(map(abs, (*lo, *map(operator.add, lo, size))))
        self.key64 = volume >= _INT32
        self.oversized = volume >= 1 << 62 or max(size) >= _INT32
        self.layouts: dict[tuple[torch.device, int], KeyLayout] = {}  # see `laid_out`
        self._steps: tuple[int, ...] | None = None

    @staticmethod
    def of(lo: tuple[int, ...], size: tuple[int, ...]) -> Box:
        """The box from `lo` of extents `size` ([1 + D] each, in cells).

        Raises: GeometryError for no such tuples; its ExtentError for a negative extent; OverflowLimitError beyond
        32-bit coordinates or keys of 2^62.
        """
        if not (isinstance(lo, tuple) and isinstance(size, tuple) and len(lo) == len(size)):
            raise GeometryError(f"lo is {lo!r} and size {size!r}; expected two tuples of 1 + D numbers, batch first.")
        return Box._of(lo, size)

    @staticmethod
    @functools.lru_cache(maxsize=64)  # streams bring ever new ones: those of a few scenes
    def _of(lo: tuple[int, ...], size: tuple[int, ...]) -> Box:
        for column, (low, extent) in enumerate(zip(lo, size, strict=True)):
            name = "the batch column" if column == 0 else f"axis {column - 1}"
            if extent < 0:
                raise ExtentError(f"{name} has an extent of {extent}; expected 0 or more cells.")
            if extent >= _INT32 or low < -_INT32 or low + extent > _INT32:
                raise OverflowLimitError(
                    f"{name} spans [{low}, {low + extent}), which leaves the 32-bit coordinate "
                    "range; "
                    "shift or coarsen the coordinates."
                )
        box = Box(lo, size)
        if box.volume >= 1 << 62:
            raise OverflowLimitError(
                f"a box of extents {list(size)} (batch first) holds {box.volume} cells; keys take "
                "at most 2^62. "
                "Use fewer batch items per tensor or a coarser grid."
            )
        return _bounded.setdefault((lo, size), box)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def spanning(lo: tuple[int, ...], size: tuple[int, ...]) -> Box:
        """A box of any volume, for data without bounds of its own (see `oversized`). Raises: OverflowLimitError
        where coordinates leave 32 bits."""
        for column, (low, extent) in enumerate(zip(lo, size, strict=True)):
            if extent < 0 or low < -_INT32 or low + extent > _INT32:
                name = "the batch column" if column == 0 else f"axis {column - 1}"
                raise OverflowLimitError(
                    f"{name} reaches [{low}, {low + extent}), outside of 32-bit coordinates; "
                    "shift or coarsen the coordinates."
                )
        return _unbounded.setdefault((lo, size), Box(lo, size))

    @staticmethod
    def grid(batch_size: int, spatial_shape: Sequence[int]) -> Box:
        """Coordinates 0 <= c < spatial_shape of batch items 0 .. batch_size - 1."""
        size = (batch_size, *spatial_shape)
        return Box._of((0,) * len(size), size)

    def __repr__(self) -> str:
        return f"Box(lo={list(self.lo)}, size={list(self.size)})"

    def layout(self, device: torch.device) -> KeyLayout:
        """The keys of the box, for kernels on `device`; cached. Does not wait for the device."""
        return laid_out([self], device)[0]

    @property
    def steps(self) -> tuple[int, ...]:
        """[1 + D]: the products with coordinates of the box ascend by batch and then by the axes
        from the last to the first. Empty where they may leave 62 bits."""
        if self._steps is None:
            steps, step, furthest = [1] * len(self.size), 1, 0
            for column in (*range(1, len(self.size)), 0):
                steps[column] = step
                low, extent = self.lo[column], self.size[column]
                furthest += max(abs(low), abs(low + extent)) * step
                step *= max(1, extent)
            self._steps = tuple(steps) if furthest < 1 << 62 else ()
        return self._steps

    def wide(self, offsets: Offsets, multiplier: tuple[int, ...]) -> bool:
        """Whether coordinate * multiplier + offset can leave 32 bits for coordinates of this
        box."""
        if self.furthest * (max(multiplier) + 1) + offsets.furthest < _INT32:
            return False  # without a look at every axis
        for axis in range(self.dimension):
            low, extent = self.lo[axis + 1], self.size[axis + 1]
            largest = max(abs(low), abs(low + extent)) * multiplier[axis] + offsets.reach(axis)
            if largest + abs(low) >= _INT32:
                return True
        return False


_Boxes = weakref.WeakValueDictionary[tuple[tuple[int, ...], tuple[int, ...]], Box]
_bounded: _Boxes = weakref.WeakValueDictionary()  # of `Box._of`, as long as somebody has them
_unbounded: _Boxes = weakref.WeakValueDictionary()  # of `Box.spanning`


class KeyLayout(NamedTuple):
    """The keys of coordinates.

    limits: a box that holds them all, as far as the host knows.  key64: width of the keys.
    bounds: int32 [1 + D, 2] on the device, (lo, size) per column.  steps: int64 [1 + D] on the
    device, see `Box.steps`; None where there are none.
    """

    limits: Box
    key64: bool
    bounds: Part
    steps: Part | None

    def wide(self, offsets: Offsets, multiplier: tuple[int, ...]) -> bool:
        """Whether coordinate * multiplier + offset can leave 32 bits."""
        return self.limits.wide(offsets, multiplier)


def record_of(box: Box) -> list[int]:
    """What the device has to know of a box: steps and then bounds, each starting at a multiple of
    16 bytes, as int64 (bounds two to one)."""
    even = [0] * (len(box.size) % 2)
    steps = box.steps or (0,) * len(box.size)
    bounds = [low & 0xFFFFFFFF | size << 32 for low, size in zip(box.lo, box.size, strict=True)]
    return [*steps, *even, *bounds, *even]


def layout_over(records: torch.Tensor, start: int, limits: Box, key64: bool, sortable: bool) -> KeyLayout:
    """The layout that reads the record from `start` of `records` on, int64 [L] on the device, see `record_of`.
    Elements, not bytes, are counted."""
    columns = len(limits.size)
    bounds = Part(records, start + columns + columns % 2, (columns, 2))
    steps = Part(records, start, (columns,), torch.int64) if sortable else None
    return KeyLayout(limits, key64, bounds, steps)


def laid_out(boxes: Sequence[Box], device: torch.device) -> list[KeyLayout]:
    """The layouts of these boxes, for work on the current stream; new ones are sent in one copy. Raises Refusal as
    `check_uploads` does."""
    check_uploads()
    key = device, current_stream(device)
    new = list(dict.fromkeys(box for box in boxes if key not in box.layouts))
    if new:
        values, starts = list[int](), list[int]()
        for box in new:
            starts.append(len(values))
            values += record_of(box)
        sent = uploaded(values, device)
        for box, start in zip(new, starts, strict=True):
            box.layouts[key] = layout_over(sent, start, box, box.key64, bool(box.steps))
    return [box.layouts[key] for box in boxes]
