"""Kernel offsets as data."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from ...errors import GeometryError, OverflowLimitError

if TYPE_CHECKING:
    from ...kernels.maps.coord_key import Geometry

_INT32 = 1 << 31
_CLASSES = 1 << 12  # of remainders behind a stride, for which offsets are listed


class Offsets:
    """An ordered list of kernel offsets [V, D]; matrix v of a weight belongs to offset v.

    Instances are interned by `Offsets.of`, so they compare and hash by identity. symmetric: offset
    V - 1 - v is the negative of offset v.  center: index of the zero offset, -1 if absent.
    furthest: the largest absolute offset along any axis.
    """

    __slots__ = ("_geometry", "_reach", "center", "dimension", "furthest", "symmetric", "values")

    _interned: ClassVar[dict[tuple[tuple[int, ...], ...], Offsets]] = {}

    def __init__(self, values: tuple[tuple[int, ...], ...]) -> None:
        self.values = values
        self.dimension = len(values[0])
        self.symmetric = all(a == tuple(-c for c in b) for a, b in zip(values, reversed(values), strict=True))
        self._reach: tuple[int, ...] = tuple(max(map(abs, column)) for column in zip(*values, strict=True))
        self.furthest = max(self._reach)
        zero = (0,) * self.dimension
        self.center = values.index(zero) if zero in values else -1
        self._geometry: dict[tuple[object, ...], Geometry] = {}

    @staticmethod
    def of(values: Sequence[Sequence[int]]) -> Offsets:
        """The offsets `values` ([V, D], V >= 1), in that order.

        Raises: GeometryError for an empty or ragged list or a repeated offset, OverflowLimitError beyond 32 bits.
        """
        key = tuple(tuple(int(c) for c in offset) for offset in values)
        interned = Offsets._interned.get(key)
        if interned is None:
            if not key or len({len(offset) for offset in key}) != 1 or not key[0]:
                raise GeometryError(f"offsets must be a non-empty [V, D] list, got {values!r}.")
            if len(set(key)) != len(key):
                raise GeometryError(f"kernel offsets repeat: {values!r}; every matrix needs an offset of its own.")
            largest = max(abs(c) for offset in key for c in offset)
            if largest >= _INT32:
                raise OverflowLimitError(
                    f"a kernel offset of {largest} leaves the 32-bit coordinate range; use less dilation or padding."
                )
            interned = Offsets._interned.setdefault(key, Offsets(key))
        return interned

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
        geometry = self._geometry.get(key)
        if geometry is None:
            from ...kernels.maps.coord_key import Geometry

            shifts = tuple(step.bit_length() - 1 for step in divisor)
            shifted = all(1 << shift == step for shift, step in zip(shifts, divisor, strict=True))
            division = 0 if max(divisor) == 1 else 1 if shifted else 2
            rows = [
                multiplier,
                shifts if shifted else divisor,
                *(tuple(sign * c for c in offset) for offset in self.values),
            ]
            table = torch.tensor(rows, dtype=torch.int32, device=device)
            geometry = Geometry(table, division, self._classes(device, divisor, sign))
            self._geometry[key] = geometry
        return geometry

    def _classes(self, device: torch.device, divisor: tuple[int, ...], sign: int) -> torch.Tensor | None:
        """`Geometry.class_offsets`, where a class has fewer offsets than there are."""
        n_classes = math.prod(divisor)
        if n_classes == 1 or n_classes > _CLASSES:
            return None
        members: list[list[int]] = [[] for _ in range(n_classes)]
        for v, offset in enumerate(self.values):
            index = 0
            for c, step in zip(offset, divisor, strict=True):
                index = index * step + -sign * c % step
            members[index].append(v)
        most = max(map(len, members))
        if most == len(self):
            return None
        rows = [row + [-1] * (most - len(row)) for row in members]
        return torch.tensor(rows, dtype=torch.int32, device=device)


@functools.cache
def box_offsets(kernel_size: tuple[int, ...], dilation: tuple[int, ...], origin: tuple[int, ...]) -> Offsets:
    """Offsets `r * dilation - origin` of a box kernel, r row-major with the last axis fastest."""
    steps = itertools.product(*(range(k) for k in kernel_size))
    return Offsets.of([tuple(r * d - o for r, d, o in zip(step, dilation, origin, strict=True)) for step in steps])
