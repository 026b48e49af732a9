"""MinkowskiEngine's kernels as values: regions as lists of points, and as offsets of the core."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.geometry.offsets import Offsets
from ...errors import ContractError, UnsupportedError
from .errors import ArgumentValueError, StrideError
from .upstream.enums import RegionType

Points = tuple[tuple[int, ...], ...]


def int_list(value: Any, dimension: int, what: str = "argument") -> list[int]:
    """One integer per axis from a number or a sequence, array or tensor of D numbers.

    Raises: ContractError (wrong length), ArgumentValueError (not numbers).
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.reshape(-1).tolist()
    if isinstance(value, np.number):
        value = value.item()
    if isinstance(value, (int, float)):
        return [int(value)] * dimension
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ArgumentValueError(
            f"{what} is {value!r}; expected a number or a sequence of {dimension} numbers."
        )
    numbers = [int(v) for v in value]
    if len(numbers) != dimension:
        raise ContractError(
            f"{what} has {len(numbers)} entries; the tensor has {dimension} spatial axes."
        )
    return numbers


@functools.cache
def _cube(kernel_size: tuple[int, ...]) -> Points:
    """Axis 1 varies fastest; odd sizes are centred, even ones run 0 .. k - 1."""
    points = []
    for index in range(math.prod(kernel_size)):
        point = []
        for k in kernel_size:
            index, r = divmod(index, k)
            point.append(r - k // 2 if k % 2 else r)
        points.append(tuple(point))
    return tuple(points)


@functools.cache
def _cross(kernel_size: tuple[int, ...]) -> Points:
    """The centre, then per axis +1 .. +r, -r .. -1."""
    if any(k % 2 == 0 for k in kernel_size):
        raise ContractError(
            f"kernel size {list(kernel_size)} for HYPER_CROSS; every size must be odd."
        )
    points = [(0,) * len(kernel_size)]
    for axis, k in enumerate(kernel_size):
        r = k // 2
        for step in (*range(1, r + 1), *range(-r, 0)):
            points.append(tuple(step if a == axis else 0 for a in range(len(kernel_size))))
    return tuple(points)


def custom_points(region_offsets: Any, dimension: int) -> Points:
    """Points of a CUSTOM region from [V, D] integers (a tensor, array or nested sequence).

    Raises: ContractError.
    """
    rows = torch.as_tensor(region_offsets).cpu().reshape(-1, dimension).tolist()
    points = tuple(tuple(int(c) for c in row) for row in rows)
    if not points or len(set(points)) != len(points):
        raise ContractError(
            f"region_offsets {rows}; expected one or more different offsets of {dimension} axes."
        )
    return points


class Region:
    """Kernel offsets in MinkowskiEngine's order, dilated, counted in tensor strides.

    Interned, so that regions compare and hash by identity.
    """

    __slots__ = ("points",)

    _interned: ClassVar[dict[Points, Region]] = {}

    def __init__(self, points: Points) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    @staticmethod
    def of(points: Points) -> Region:
        return Region._interned.setdefault(points, Region(points))


@functools.lru_cache(maxsize=1024)
def kernel_region(
    region_type: RegionType,
    kernel_size: tuple[int, ...],
    dilation: tuple[int, ...],
    custom: Points | None = None,
) -> Region:
    """The offsets of a kernel; `custom` are those of a CUSTOM region.

    Raises: ContractError, UnsupportedError.
    """
    if region_type is RegionType.CUSTOM:
        if custom is None:
            raise ContractError("RegionType.CUSTOM needs region_offsets, integers [V, D].")
        points = custom
    elif region_type is RegionType.HYBRID:
        raise UnsupportedError(
            "RegionType.HYBRID belongs to MinkowskiEngine 0.4 and has no definition in 0.5. "
            "Use RegionType.CUSTOM with region_offsets."
        )
    elif region_type is RegionType.HYPER_CROSS and math.prod(kernel_size) > 1:
        points = _cross(kernel_size)
    else:
        points = _cube(kernel_size)
    dilated = (tuple(c * d for c, d in zip(p, dilation, strict=True)) for p in points)
    return Region.of(tuple(dilated))


@functools.lru_cache(maxsize=1024)
def cell_region(size: tuple[int, ...]) -> Region:
    """The offsets 0 .. size - 1 of a cell, in the order of a kernel of that (even) size."""
    axes = (range(s) for s in size[::-1])
    return Region.of(tuple(point[::-1] for point in itertools.product(*axes)))


@functools.lru_cache(maxsize=4096)
def core_offsets(region: Region, scale: tuple[int, ...]) -> Offsets:
    """The core's offsets for a region times `scale`, axes reversed as in `grid`.

    Raises: StrideError where a scale of 0 makes offsets coincide.
    """
    if any(s == 0 for s in scale) and len(region) > 1:
        raise StrideError(
            "a window larger than one cell on a tensor of tensor stride 0 (a globally pooled one); "
            "only kernel size 1 makes sense there."
        )
    return Offsets.of(
        [tuple(c * s for c, s in zip(p, scale, strict=True))[::-1] for p in region.points]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class KernelSpec:
    """Kernel of a layer: offsets, size and stride per axis, whether it makes new coordinates and
    whether it is transposed.

    Made by `kernel_spec`, so that equal ones are one object, which tables find by identity.
    """

    region: Region
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    expand: bool
    transposed: bool

    @property
    def strided(self) -> bool:
        return any(s > 1 for s in self.stride)

    @property
    def cells(self) -> bool:
        """As a pool: every input belongs to one cell of the stride, instead of to windows."""
        return self.kernel_size == self.stride

    def scaled(self, tensor_stride: Iterable[int]) -> list[int]:
        """The tensor stride behind this kernel."""
        pairs = zip(tensor_stride, self.stride, strict=True)
        return [t // s if self.transposed else t * s for t, s in pairs]


@functools.cache
def kernel_spec(
    region: Region, kernel_size: tuple[int, ...], stride: tuple[int, ...], expand: bool,
    transposed: bool,
) -> KernelSpec:  # fmt: skip
    """The one `KernelSpec` of these values."""
    return KernelSpec(region, kernel_size, stride, expand, transposed)
