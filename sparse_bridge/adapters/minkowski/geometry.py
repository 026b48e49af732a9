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
from ...errors import ContractError
from .errors import ArgumentValueError, StrideError
from .strides import product, ratio
from .upstream.enums import RegionType

Points = tuple[tuple[int, ...], ...]


def _whole(value: Any, name: str) -> int:
    if isinstance(value, int):
        return int(value)
    try:
        integer = int(value)
    except (TypeError, ValueError, OverflowError):
        integer = None
    if integer is None or integer != value:
        raise ArgumentValueError(f"{name} has the entry {value!r}; expected a whole number.")
    return integer


def is_count(value: Any) -> bool:
    """Whether a number of axes is one: an integer from 1 on, of any kind, in a graph a symbolic one, too."""
    return not isinstance(value, (str, float, list, tuple, type(None))) and bool(value >= 1)


def int_list(value: Any, dimension: int, name: str = "argument") -> list[int]:
    """One integer per axis from a number or a sequence, array or tensor of D numbers.

    Raises: ContractError (wrong length), ArgumentValueError (not whole numbers).
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.reshape(-1).tolist() if value.ndim else value.item()
    if isinstance(value, np.number):
        value = value.item()
    if isinstance(value, (int, float)):
        return [_whole(value, name)] * dimension
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ArgumentValueError(f"{name} is {value!r}; expected a number or a sequence of {dimension} numbers.")
    numbers = [_whole(v, name) for v in value]
    if len(numbers) != dimension:
        raise ContractError(f"{name} has {len(numbers)} entries; the tensor has {dimension} spatial axes.")
    return numbers


@functools.cache
def cube_points(kernel_size: tuple[int, ...]) -> Points:
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
        raise ContractError(f"kernel size {list(kernel_size)} for HYPER_CROSS; every size must be odd.")
    points = [(0,) * len(kernel_size)]
    for axis, k in enumerate(kernel_size):
        r = k // 2
        for step in (*range(1, r + 1), *range(-r, 0)):
            points.append(tuple(step if a == axis else 0 for a in range(len(kernel_size))))
    return tuple(points)


@functools.cache
def hybrid_points(kernel_size: tuple[int, ...], axis_types: tuple[RegionType, ...]) -> Points:
    """A cube over some axes with a cross over the others, in the order of MinkowskiEngine 0.4.

    The centre, then every cube axis multiplies what is there by its steps, then every cross axis
    adds its own. Steps ascend without 0; those of an even size k run -(k - 1) // 2 .. k // 2.
    """
    points = [(0,) * len(kernel_size)]
    steps = [[r - (k - 1) // 2 for r in range(k) if r != (k - 1) // 2] for k in kernel_size]
    for region_type in (RegionType.HYPER_CUBE, RegionType.HYPER_CROSS):
        for axis, axis_type in enumerate(axis_types):
            if axis_type is region_type:
                start = points if region_type is RegionType.HYPER_CUBE else points[:1]
                points = points + [(*point[:axis], step, *point[axis + 1 :]) for point in start for step in steps[axis]]
    return tuple(points)


def region_of_axes(region_type: RegionType, axis_types: Any, dimension: int) -> RegionType:
    """The region type that `axis_types` (a RegionType per axis, or None) make of a region type.

    Axes that differ make a cube HYBRID.  Raises: ContractError.
    """
    if axis_types is None:
        if region_type is RegionType.HYBRID:
            raise ContractError("RegionType.HYBRID needs axis_types, HYPER_CUBE or HYPER_CROSS for every axis.")
        return region_type
    distinct_types = {RegionType(axis_type) for axis_type in axis_types}
    simple = {RegionType.HYPER_CUBE, RegionType.HYPER_CROSS}
    if len(axis_types) != dimension or not distinct_types <= simple:
        raise ContractError(
            f"axis_types is {axis_types}; expected HYPER_CUBE or HYPER_CROSS for each of {dimension} axes."
        )
    if region_type is RegionType.HYBRID or distinct_types == {region_type}:
        return region_type
    if region_type is not RegionType.HYPER_CUBE or len(distinct_types) == 1:
        raise ContractError(
            f"axis_types is {axis_types}, but the region is {region_type.name}; leave one out, or "
            "use RegionType.HYBRID."
        )
    return RegionType.HYBRID


def custom_points(region_offsets: Any, dimension: int) -> Points:
    """Points of a CUSTOM region from [V, D] integers (a tensor, array or nested sequence).

    Raises: ContractError.
    """
    rows = torch.as_tensor(region_offsets).cpu().reshape(-1, dimension).tolist()
    points = tuple(tuple(int(c) for c in row) for row in rows)
    if not points or len(set(points)) != len(points):
        raise ContractError(f"region_offsets {rows}; expected one or more different offsets of {dimension} axes.")
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
    region_type: RegionType, kernel_size: tuple[int, ...], dilation: tuple[int, ...], custom: Points | None = None
) -> Region:
    """The offsets of a kernel; `custom` are those of a CUSTOM or HYBRID region.

    Raises: ContractError.
    """
    if custom is not None:
        points = custom
    elif region_type in (RegionType.CUSTOM, RegionType.HYBRID):
        raise ContractError(f"RegionType.{region_type.name} without its offsets.")
    elif region_type is RegionType.HYPER_CROSS and math.prod(kernel_size) > 1:
        points = _cross(kernel_size)
    else:
        points = cube_points(kernel_size)
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
    scaled = [tuple(c * s for c, s in zip(p, scale, strict=True))[::-1] for p in region.points]
    if 0 in scale and len(set(scaled)) < len(scaled):
        raise StrideError(
            "a window larger than one cell on a tensor of tensor stride 0 (a globally pooled one); "
            "only kernel size 1 makes sense there."
        )
    return Offsets.of(scaled)


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
        return list((ratio if self.transposed else product)(tuple(tensor_stride), self.stride))


@functools.cache
def kernel_spec(
    region: Region, kernel_size: tuple[int, ...], stride: tuple[int, ...], expand: bool, transposed: bool
) -> KernelSpec:
    """The one `KernelSpec` of these values."""
    return KernelSpec(region, kernel_size, stride, expand, transposed)


@functools.cache
def folded(spec: KernelSpec, tensor_stride: tuple[int, ...]) -> tuple[KernelSpec, list[int]]:
    """A kernel on a tensor stride with zeros, where offsets coincide: the kernel of the different
    ones, and which of them each offset became. Weights of one offset add up."""
    scale = spec.scaled(tensor_stride) if spec.transposed else tensor_stride
    flat = [tuple(c if s else 0 for c, s in zip(p, scale, strict=True)) for p in spec.region.points]
    points = tuple(dict.fromkeys(flat))
    region = Region.of(points)
    folded_spec = kernel_spec(region, spec.kernel_size, spec.stride, spec.expand, spec.transposed)
    return folded_spec, [points.index(point) for point in flat]
