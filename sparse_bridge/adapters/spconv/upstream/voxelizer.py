"""spconv's voxelizers: `PointToVoxel` on torch tensors, `Point2Voxel*` on `tv.Tensor`.

One deterministic rule on every device: voxels in the order of their first point, points in input
order, the first `max_num_voxels` voxels and the first `max_num_points_per_voxel` points of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....errors import ContractError, DataTypeError
from . import tensorview as tv
from ._voxel_fill import VoxelBuffers
from ._voxel_grid import GridError, PointDataTypeError, PointShapeError, VoxelGrid

__all__ = [
    "GridError", "Point2VoxelCPU1d", "Point2VoxelCPU2d", "Point2VoxelCPU3d", "Point2VoxelCPU4d",
    "Point2VoxelGPU1d", "Point2VoxelGPU2d", "Point2VoxelGPU3d", "Point2VoxelGPU4d",
    "PointDataTypeError", "PointShapeError", "PointToVoxel", "gather_features_by_pc_voxel_id",
    "voxelized",
]  # fmt: skip


class PointToVoxelArgumentError(DataTypeError, AttributeError):
    """`device` or the points are not torch objects; an AttributeError upstream."""


class PointToVoxel:
    """Points to voxels on torch tensors.

    Args:
        vsize_xyz: voxel size per axis (1 to 4 axes), x first.
        coors_range_xyz: lower bounds, then upper bounds (exclusive), x first.
        num_point_features: columns of the points, coordinates included.
        max_num_voxels: voxels kept per call.
        max_num_points_per_voxel: points kept per voxel.
        device: a torch.device.

    The attributes `vsize`, `grid_size`, `grid_stride`, `coors_range` run z, y, x. `voxels`,
    `indices` and `num_per_voxel` are the work buffers of the last call; results are copies.
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device = torch.device("cpu:0"),  # noqa: B008 (upstream's signature)
    ) -> None:
        if not isinstance(device, torch.device):
            raise PointToVoxelArgumentError(
                f"device is {device!r}; pass a torch.device, such as torch.device({str(device)!r})"
            )
        grid = VoxelGrid.from_xyz(vsize_xyz, coors_range_xyz)
        self.ndim = grid.ndim
        self.device = device
        self.num_point_features = num_point_features
        self.max_num_voxels = max_num_voxels
        self.max_num_points_per_voxel = max_num_points_per_voxel
        self.vsize, self.grid_size = grid.vsize, grid.grid_size
        self.grid_stride, self.coors_range = grid.grid_stride, grid.coors_range
        self._buffers = VoxelBuffers(
            grid, num_point_features, max_num_voxels, max_num_points_per_voxel, device
        )
        # Upstream's hash table and scratch; nothing is looked up in them here.
        self.hashdata = torch.empty(0, dtype=torch.int32, device=device)
        self.point_indice_data = torch.empty(0, device=device)

    @property
    def voxels(self) -> torch.Tensor:
        return self._buffers.voxels

    @property
    def indices(self) -> torch.Tensor:
        return self._buffers.indices

    @property
    def num_per_voxel(self) -> torch.Tensor:
        return self._buffers.num_per_voxel

    def __call__(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Voxelize `pc` [n, F] (float32 or float64; first columns x, y, z).

        Args:
            clear_voxels: if off, slots that receive no point keep what earlier calls left there.
            empty_mean: fill the unused slots of each voxel with the mean of the used ones.

        Returns:
            voxels float32 [M, P, F], indices int32 [M, nd] (z, y, x; no batch column) and
            num_per_voxel int32 [M].

        Raises:
            ContractError: `pc` lies on another device.
            PointShapeError, PointDataTypeError: `pc` has the wrong shape or dtype.
        """
        return voxelized(self._buffers, pc, clear_voxels, empty_mean, False)

    def generate_voxel_with_id(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As a call, plus int64 [n]: the voxel of each point, -1 for none.

        Points beyond a full voxel's capacity carry its id; points outside the range, or in a cell
        that came after the last voxel, carry -1.
        """
        return voxelized(self._buffers, pc, clear_voxels, empty_mean, True)


def voxelized(
    buffers: VoxelBuffers, pc: torch.Tensor, clear_voxels: bool, empty_mean: bool, with_ids: bool
) -> tuple[Any, ...]:
    """What `PointToVoxel` returns: copies of the buffers, and ids where they are wanted."""
    device = buffers.voxels.device
    if not isinstance(pc, torch.Tensor):
        raise PointToVoxelArgumentError(
            f"the points are a {type(pc).__name__}; pass a torch.Tensor on {device}"
        )
    if pc.device != device:
        raise ContractError(
            f"your pc device is wrong: the points are on {pc.device}, this voxelizer works "
            f"on {device}; move one of them"
        )
    count, ids = buffers.fill(pc, clear_voxels, empty_mean, with_ids)
    return (*buffers.copies(count), ids) if with_ids else buffers.copies(count)


def gather_features_by_pc_voxel_id(
    seg_res_features: torch.Tensor, pc_voxel_id: torch.Tensor, invalid_value: int | float = 0
) -> torch.Tensor:
    """Rows of `seg_res_features` [M, ...] by voxel id [n]; `invalid_value` where an id is negative.

    The ids move to the features' device. Returns [n, ...] in the features' dtype; differentiable.
    """
    ids = pc_voxel_id.to(device=seg_res_features.device, dtype=torch.int64)
    absent = ids < 0
    tail = seg_res_features.shape[1:]
    if seg_res_features.shape[0] == 0 and bool(absent.all()):
        return seg_res_features.new_full((*ids.shape, *tail), invalid_value)
    rows = seg_res_features[ids.clamp(min=0)]
    mask = absent.view(*ids.shape, *(1 for _ in tail))
    return torch.where(mask, rows.new_tensor(invalid_value), rows)


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
    def calc_meta_data(
        cls, vsize_xyz: Sequence[float], coors_range_xyz: Sequence[float]
    ) -> tuple[list[float], list[int], list[int], list[float]]:
        """(vsize, grid_size, grid_stride, coors_range) in z, y, x order, rounded to float32."""
        grid = VoxelGrid.from_xyz(vsize_xyz, coors_range_xyz, cls._NDIM)
        return grid.vsize, grid.grid_size, grid.grid_stride, grid.coors_range

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

    def _run(
        self, points: torch.Tensor, clear_voxels: bool, empty_mean: bool
    ) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        buffers = self._on(points.device)
        count, _ = buffers.fill(points, clear_voxels, empty_mean)
        return (
            tv.from_torch(buffers.voxels[:count]),
            tv.from_torch(buffers.indices[:count]),
            tv.from_torch(buffers.num_per_voxel[:count]),
        )


class _Point2VoxelCPU(_Point2Voxel):
    @property
    def densehashdata(self) -> tv.Tensor:
        """An empty cell table [*grid_size] of -1, as upstream has between calls; made on demand."""
        return tv.full(self.grid_size, -1, tv.int32)

    def point_to_voxel(
        self, points: Any, clear_voxels: bool = True
    ) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        """Voxelize `points`, a CPU tv.Tensor [n, F] of float32 or float64.

        Returns (voxels float32 [M, P, F], indices int32 [M, nd], num_per_voxel int32 [M]): views of
        the buffers.
        """
        return self._run(_cpu_points(points), clear_voxels, False)

    def point_to_voxel_empty_mean(
        self, points: Any, clear_voxels: bool = True
    ) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        """As `point_to_voxel`; the unused slots of each voxel hold the mean of the used ones."""
        return self._run(_cpu_points(points), clear_voxels, True)


def _cpu_points(points: Any) -> torch.Tensor:
    converted = tv.to_torch(points)
    if converted.device.type != "cpu":
        raise DataTypeError(
            f"points are on {converted.device}; a Point2VoxelCPU takes .cpu() tensors only, "
            "use Point2VoxelGPU for this device"
        )
    return converted


class _Point2VoxelGPU(_Point2Voxel):
    def _home(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def point_to_voxel_hash(
        self,
        points: Any,
        clear_voxels: bool = True,
        empty_mean: bool = False,
        stream_int: int = 0,
    ) -> tuple[tv.Tensor, tv.Tensor, tv.Tensor]:
        """Voxelize `points`, a tv.Tensor [n, F] of float32 or float64, on the device it lies on.

        `stream_int` is a raw stream handle; 0 means torch's current stream. Returns
        (voxels float32 [M, P, F], indices int32 [M, nd], num_per_voxel int32 [M]): views of the
        buffers.
        """
        converted = tv.to_torch(points)
        if not stream_int or not converted.is_cuda:
            return self._run(converted, clear_voxels, empty_mean)
        stream = torch.cuda.ExternalStream(stream_int, device=converted.device)
        with torch.cuda.stream(stream):
            return self._run(converted, clear_voxels, empty_mean)


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
