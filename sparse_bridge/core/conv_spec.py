"""Geometry of a convolution as data: offset lists, boxes of coordinates, output sizes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from ..errors import GeometryError, OverflowLimitError

if TYPE_CHECKING:
    from ..kernels.coord_key import Geometry

__all__ = ["Box", "Offsets", "box_offsets"]

_INT32 = 1 << 31
_CLASSES = 1 << 12  # of remainders behind a stride, for which offsets are listed


class Offsets:
    """An ordered list of kernel offsets [V, D]; tap v of a weight belongs to offset v.

    Instances are interned by `Offsets.of`, so they compare and hash by identity. symmetric: offset
    V - 1 - v is the negative of offset v.  center: index of the zero offset, -1 if absent.
    """

    __slots__ = ("_geometry", "_reach", "center", "dimension", "symmetric", "values")

    _interned: ClassVar[dict[tuple[tuple[int, ...], ...], Offsets]] = {}

    def __init__(self, values: tuple[tuple[int, ...], ...]) -> None:
        self.values = values
        self.dimension = len(values[0])
        self.symmetric = all(
            a == tuple(-c for c in b) for a, b in zip(values, reversed(values), strict=True)
        )
        self._reach = tuple(max(map(abs, column)) for column in zip(*values, strict=True))
        zero = (0,) * self.dimension
        self.center = values.index(zero) if zero in values else -1
        self._geometry: dict[tuple[object, ...], Geometry] = {}

    @staticmethod
    def of(values: Sequence[Sequence[int]]) -> Offsets:
        """The offsets `values` ([V, D], V >= 1), in that order."""
        key = tuple(tuple(int(c) for c in offset) for offset in values)
        found = Offsets._interned.get(key)
        if found is None:
            if not key or len({len(offset) for offset in key}) != 1 or not key[0]:
                raise GeometryError(f"offsets must be a non-empty [V, D] list, got {values!r}.")
            if len(set(key)) != len(key):
                raise GeometryError(
                    f"kernel offsets repeat: {values!r}; every tap needs an offset of its own."
                )
            largest = max(abs(c) for offset in key for c in offset)
            if largest >= _INT32:
                raise OverflowLimitError(
                    f"a kernel offset of {largest} leaves the 32-bit coordinate range; use less "
                    "dilation or padding."
                )
            found = Offsets._interned.setdefault(key, Offsets(key))
        return found

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Offsets(V={len(self)}, D={self.dimension})"

    def reach(self, axis: int) -> int:
        """Largest absolute offset along `axis`."""
        return self._reach[axis]

    def geometry(
        self, device: torch.device, multiplier: tuple[int, ...], divisor: tuple[int, ...], sign: int
    ) -> Geometry:
        """int32 [2 + V, D] on `device`: multipliers, divisors, sign * offsets (see
        `kernels.coord_key`); cached."""
        key = (device, multiplier, divisor, sign)
        found = self._geometry.get(key)
        if found is None:
            from ..kernels.coord_key import Geometry

            shifts = tuple(step.bit_length() - 1 for step in divisor)
            shifted = all(1 << shift == step for shift, step in zip(shifts, divisor, strict=True))
            division = 0 if max(divisor) == 1 else 1 if shifted else 2
            rows = [
                multiplier,
                shifts if shifted else divisor,
                *(tuple(sign * c for c in offset) for offset in self.values),
            ]
            table = torch.tensor(rows, dtype=torch.int32, device=device)
            found = Geometry(table, division, self._classes(device, divisor, sign))
            self._geometry[key] = found
        return found

    def _classes(
        self, device: torch.device, divisor: tuple[int, ...], sign: int
    ) -> torch.Tensor | None:
        """`Geometry.taps`, where a class has fewer offsets than there are."""
        n_classes = math.prod(divisor)
        if n_classes == 1 or n_classes > _CLASSES:
            return None
        taps: list[list[int]] = [[] for _ in range(n_classes)]
        for v, offset in enumerate(self.values):
            kind = 0
            for c, step in zip(offset, divisor, strict=True):
                kind = kind * step + -sign * c % step
            taps[kind].append(v)
        most = max(map(len, taps))
        if most == len(self):
            return None
        rows = [one + [-1] * (most - len(one)) for one in taps]
        return torch.tensor(rows, dtype=torch.int32, device=device)


@functools.cache
def box_offsets(
    kernel_size: tuple[int, ...], dilation: tuple[int, ...], origin: tuple[int, ...]
) -> Offsets:
    """Offsets `r * dilation - origin` of a box kernel, taps r row-major with the last axis
    fastest."""
    taps = itertools.product(*(range(k) for k in kernel_size))
    return Offsets.of(
        [tuple(r * d - o for r, d, o in zip(tap, dilation, origin, strict=True)) for tap in taps]
    )


class Box:
    """Coordinates a map may hold: lo <= coordinate < lo + size per column, batch first.

    Interned by value. Keys of the box are row-major indices, int32 when they fit.
    """

    __slots__ = ("_bounds", "lo", "size", "volume")

    def __init__(self, lo: tuple[int, ...], size: tuple[int, ...]) -> None:
        self.lo, self.size = lo, size
        volume = 1
        for extent in size:
            volume *= extent
        self.volume = volume
        self._bounds: dict[torch.device, torch.Tensor] = {}

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(lo: tuple[int, ...], size: tuple[int, ...]) -> Box:
        """The box from `lo` of extents `size` ([1 + D] each); checks that coordinates and keys stay
        in range."""
        for column, (low, extent) in enumerate(zip(lo, size, strict=True)):
            name = "the batch column" if column == 0 else f"axis {column - 1}"
            if extent < 0:
                raise GeometryError(f"{name} has an extent of {extent}; expected 0 or more cells.")
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
        return box

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def spanning(lo: tuple[int, ...], size: tuple[int, ...]) -> Box:
        """A box of any volume, for data without bounds of its own (see `oversized`)."""
        for column, (low, extent) in enumerate(zip(lo, size, strict=True)):
            if extent < 0 or low < -_INT32 or low + extent > _INT32:
                name = "the batch column" if column == 0 else f"axis {column - 1}"
                raise OverflowLimitError(
                    f"{name} reaches [{low}, {low + extent}), outside of 32-bit coordinates; "
                    "shift or coarsen the coordinates."
                )
        return Box(lo, size)

    @staticmethod
    def grid(batch_size: int, spatial_shape: Sequence[int]) -> Box:
        """Coordinates 0 <= c < spatial_shape of batch items 0 .. batch_size - 1."""
        size = (batch_size, *spatial_shape)
        return Box.of((0,) * len(size), size)

    def __repr__(self) -> str:
        return f"Box(lo={list(self.lo)}, size={list(self.size)})"

    @property
    def dimension(self) -> int:
        return len(self.size) - 1

    @property
    def key64(self) -> bool:
        return self.volume >= _INT32

    @property
    def oversized(self) -> bool:
        """Too large for row-major keys: searched by whole coordinates. Only from `spanning`."""
        return self.volume >= 1 << 62 or max(self.size) >= _INT32

    def bounds(self, device: torch.device) -> torch.Tensor:
        """int32 [1 + D, 2] on `device`: (lo, size) per column; cached."""
        found = self._bounds.get(device)
        if found is None:
            rows = list(zip(self.lo, self.size, strict=True))
            found = torch.tensor(rows, dtype=torch.int32, device=device)
            self._bounds[device] = found
        return found

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - boxes and offsets are interned
    def wide(self, offsets: Offsets, multiplier: tuple[int, ...]) -> bool:
        """Whether coordinate * multiplier + offset can leave 32 bits for coordinates of this
        box."""
        for axis in range(self.dimension):
            low, extent = self.lo[axis + 1], self.size[axis + 1]
            largest = max(abs(low), abs(low + extent)) * multiplier[axis] + offsets.reach(axis)
            if largest + abs(low) >= _INT32:
                return True
        return False
