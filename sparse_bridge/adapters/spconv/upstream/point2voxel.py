"""spconv's compiled voxelizers on `tv.Tensor`: `Point2Voxel*`, and the same without an object, into
buffers of the caller's. The rule is that of `PointToVoxel`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....errors import DataTypeError
from . import tensorview as tv
from ._tv_tensor import output
from ._voxel_fill import VoxelBuffers
from ._voxel_grid import PointDataTypeError, PointShapeError, VoxelGrid

Voxels = tuple[tv.Tensor, tv.Tensor, tv.Tensor]
MetaData = tuple[list[float], list[int], list[int], list[float]]


def meta_data(vsize_xyz: Sequence[float], coors_range_xyz: Sequence[float], ndim: int | None = None) -> MetaData:
    """(vsize, grid_size, grid_stride, coors_range) in z, y, x order, rounded to float32."""
    grid = VoxelGrid.from_xyz(vsize_xyz, coors_range_xyz, ndim)
    return grid.vsize, grid.grid_size, grid.grid_stride, grid.coors_range


def voxelize_into(
    points: tv.Tensor,
    buffers: Voxels,
    points_voxel_id: tv.Tensor,
    grid: MetaData,
    clear_voxels: bool,
    empty_mean: bool,
    stream_int: int = 0,
) -> Voxels:
    """Voxelize `points` into buffers of the caller's; returns their used parts.

    Args:
        points: [n, F] of float32 or float64, on any device.
        buffers: voxels float32 [M, P, F], indices int32 [M, nd], num_per_voxel int32 [M].
        points_voxel_id: int64 [at least n], for the voxel of each point, -1 for none.
        grid: as `calc_meta_data` gives it.
        stream_int: a raw stream handle; 0 means torch's current stream.

    Raises:
        PointShapeError, PointDataTypeError: points and buffers do not go together.
    """
    vsize, size, stride, bounds = grid
    voxel_grid = VoxelGrid(_rounded(vsize), list(size), list(stride), _rounded(bounds))
    _check_buffers(points, buffers, points_voxel_id, voxel_grid.ndim)
    inside = VoxelBuffers.over(voxel_grid, *map(output, buffers))
    with _on_stream(to := tv.to_torch(points), stream_int):
        count, ids = inside.fill(to, clear_voxels, empty_mean, True)
        output(points_voxel_id)[: len(to)] = ids  # type: ignore[assignment]
    voxels, indices, counts = buffers
    return voxels[:count], indices[:count], counts[:count]


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [float(np.float32(number)) for number in numbers]


def _check_buffers(points: Any, buffers: Voxels, ids: tv.Tensor, ndim: int) -> None:
    voxels, indices, counts = buffers
    codes = [ten.dtype for ten in (voxels, indices, counts, ids)]
    if codes != [tv.float32, tv.int32, tv.int32, tv.int64]:
        raise PointDataTypeError(
            f"voxels, indices, num_per_voxel and the points' ids have dtype codes {codes}; "
            "expected float32, int32, int32 and int64"
        )
    n = voxels.dim(0)
    fits = indices.shape == [n, ndim] and counts.shape == [n] and ids.ndim == 1
    if not fits or ids.dim(0) < points.dim(0) or not voxels.is_contiguous():
        raise PointShapeError(
            f"voxels {voxels.shape}, indices {indices.shape}, num_per_voxel {counts.shape} and "
            f"ids {ids.shape} do not fit {points.dim(0)} points of {ndim} axes; expected a "
            "contiguous [M, P, F], [M, nd], [M] and [at least the number of points]"
        )


@contextlib.contextmanager
def _on_stream(points: torch.Tensor, stream_int: int) -> Any:
    if not stream_int or not points.is_cuda:
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(stream_int, device=points.device)):
        yield


class _Point2Voxel:
    """What the low-level voxelizers share; each number of axes is a class of its own.

    Results are views of internal buffers: the next call overwrites them.
    """

    _NDIM = 0

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
    ) -> None:
        self._grid = VoxelGrid.from_xyz(vsize_xyz, coors_range_xyz, self._NDIM)
        self._sizes = (num_point_features, max_num_voxels, max_num_points_per_voxel)
        self._store: VoxelBuffers | None = None

    @classmethod
    def calc_meta_data(cls, vsize_xyz: Sequence[float], coors_range_xyz: Sequence[float]) -> MetaData:
        """(vsize, grid_size, grid_stride, coors_range) in z, y, x order, rounded to float32."""
        return meta_data(vsize_xyz, coors_range_xyz, cls._NDIM)

    def _on(self, device: torch.device) -> VoxelBuffers:
        if self._store is None or self._store.voxels.device != device:
            self._store = VoxelBuffers(self._grid, *self._sizes, device=device)
        return self._store

    def _buffers(self) -> VoxelBuffers:
        return self._store if self._store is not None else self._on(self._home())

    def _home(self) -> torch.device:
        return torch.device("cpu")

    @property
    def grid_size(self) -> list[int]:
        return list(self._grid.grid_size)

    @property
    def voxels(self) -> tv.Tensor:
        return tv.from_torch(self._buffers().voxels)

    @property
    def indices(self) -> tv.Tensor:
        return tv.from_torch(self._buffers().indices)

    @property
    def num_per_voxel(self) -> tv.Tensor:
        return tv.from_torch(self._buffers().num_per_voxel)

    def _run(self, points: torch.Tensor, clear_voxels: bool, empty_mean: bool) -> Voxels:
        buffers = self._on(points.device)
        count, _ = buffers.fill(points, clear_voxels, empty_mean)
        return (
            tv.from_torch(buffers.voxels[:count]),
            tv.from_torch(buffers.indices[:count]),
            tv.from_torch(buffers.num_per_voxel[:count]),
        )


def _cpu_points(points: Any) -> torch.Tensor:
    converted = tv.to_torch(points)
    if converted.device.type != "cpu":
        raise DataTypeError(
            f"points are on {converted.device}; a Point2VoxelCPU takes .cpu() tensors only, "
            "use Point2VoxelGPU for this device"
        )
    return converted


def _static(empty_mean: bool) -> Any:
    """`voxelize_into` with the signature of spconv's static voxelizers on the CPU; densehashdata is not looked at."""

    def point_to_voxel(
        points: Any,
        voxels: tv.Tensor,
        indices: tv.Tensor,
        num_per_voxel: tv.Tensor,
        densehashdata: Any,
        points_voxel_id: tv.Tensor,
        vsize: list[float],
        grid_size: list[int],
        grid_stride: list[int],
        coors_range: list[float],
        clear_voxels: bool = True,
    ) -> Voxels:
        _cpu_points(points)
        grid, buffers = (vsize, grid_size, grid_stride, coors_range), (voxels, indices, num_per_voxel)
        return voxelize_into(points, buffers, points_voxel_id, grid, clear_voxels, empty_mean)

    return staticmethod(point_to_voxel)


class _Point2VoxelCPU(_Point2Voxel):
    @property
    def densehashdata(self) -> tv.Tensor:
        """An empty cell table [*grid_size] of -1, as upstream has between calls; made on demand."""
        return tv.full(self.grid_size, -1, tv.int32)

    def point_to_voxel(self, points: Any, clear_voxels: bool = True) -> Voxels:
        """Voxelize `points`, a CPU tv.Tensor [n, F] of float32 or float64.

        Returns (voxels float32 [M, P, F], indices int32 [M, nd], num_per_voxel int32 [M]): views of
        the buffers.
        """
        return self._run(_cpu_points(points), clear_voxels, False)

    def point_to_voxel_empty_mean(self, points: Any, clear_voxels: bool = True) -> Voxels:
        """As `point_to_voxel`; the unused slots of each voxel hold the mean of the used ones."""
        return self._run(_cpu_points(points), clear_voxels, True)

    point_to_voxel_static = _static(empty_mean=False)
    point_to_voxel_empty_mean_static = _static(empty_mean=True)


class _Point2VoxelGPU(_Point2Voxel):
    def _home(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def hashdata(self) -> tv.Tensor:
        """Empty: upstream's hash table, which nothing is looked up in here."""
        return tv.from_torch(self._buffers().voxels.new_empty(0, dtype=torch.int32))

    point_indice_data = hashdata

    def point_to_voxel_hash(
        self, points: Any, clear_voxels: bool = True, empty_mean: bool = False, stream_int: int = 0
    ) -> Voxels:
        """Voxelize `points`, a tv.Tensor [n, F] of float32 or float64, on the device it lies on.

        `stream_int` is a raw stream handle; 0 means torch's current stream. Returns
        (voxels float32 [M, P, F], indices int32 [M, nd], num_per_voxel int32 [M]): views of the
        buffers.
        """
        converted = tv.to_torch(points)
        with _on_stream(converted, stream_int):
            return self._run(converted, clear_voxels, empty_mean)

    @staticmethod
    def point_to_voxel_hash_static(
        points: Any,
        voxels: tv.Tensor,
        indices: tv.Tensor,
        num_per_voxel: tv.Tensor,
        hashdata: Any,
        point_indice_data: Any,
        points_voxel_id: tv.Tensor,
        vsize: list[float],
        grid_size: list[int],
        grid_stride: list[int],
        coors_range: list[float],
        clear_voxels: bool = True,
        empty_mean: bool = False,
        stream_int: int = 0,
    ) -> Voxels:
        """`voxelize_into`; hashdata and point_indice_data are not looked at."""
        grid, buffers = (vsize, grid_size, grid_stride, coors_range), (voxels, indices, num_per_voxel)
        return voxelize_into(points, buffers, points_voxel_id, grid, clear_voxels, empty_mean, stream_int)


class Point2VoxelCPU1d(_Point2VoxelCPU):
    _NDIM = 1


class Point2VoxelCPU2d(_Point2VoxelCPU):
    _NDIM = 2


class Point2VoxelCPU3d(_Point2VoxelCPU):
    _NDIM = 3


class Point2VoxelCPU4d(_Point2VoxelCPU):
    _NDIM = 4


class Point2VoxelGPU1d(_Point2VoxelGPU):
    _NDIM = 1


class Point2VoxelGPU2d(_Point2VoxelGPU):
    _NDIM = 2


class Point2VoxelGPU3d(_Point2VoxelGPU):
    _NDIM = 3


class Point2VoxelGPU4d(_Point2VoxelGPU):
    _NDIM = 4


class VoxelOps:
    """The voxelizers as functions of `SpconvOps`; hash tables and scratch are not looked at."""

    @staticmethod
    def calc_point2voxel_meta_data(vsize_xyz: Sequence[float], coors_range_xyz: Sequence[float]) -> MetaData:
        return meta_data(vsize_xyz, coors_range_xyz)

    @staticmethod
    def point2voxel_cpu(
        points: Any,
        voxels: tv.Tensor,
        indices: tv.Tensor,
        num_per_voxel: tv.Tensor,
        densehashdata: Any,
        pc_voxel_id: tv.Tensor,
        vsize: list[float],
        grid_size: list[int],
        grid_stride: list[int],
        coors_range: list[float],
        empty_mean: bool = False,
        clear_voxels: bool = True,
    ) -> Voxels:
        grid, buffers = (vsize, grid_size, grid_stride, coors_range), (voxels, indices, num_per_voxel)
        return voxelize_into(points, buffers, pc_voxel_id, grid, clear_voxels, empty_mean)

    @staticmethod
    def point2voxel_cuda(
        points: Any,
        voxels: tv.Tensor,
        indices: tv.Tensor,
        num_per_voxel: tv.Tensor,
        hashdata: Any,
        point_indice_data: Any,
        pc_voxel_id: tv.Tensor,
        vsize: list[float],
        grid_size: list[int],
        grid_stride: list[int],
        coors_range: list[float],
        empty_mean: bool = False,
        clear_voxels: bool = True,
        stream_int: int = 0,
    ) -> Voxels:
        grid, buffers = (vsize, grid_size, grid_stride, coors_range), (voxels, indices, num_per_voxel)
        return voxelize_into(points, buffers, pc_voxel_id, grid, clear_voxels, empty_mean, stream_int)
