"""spconv's voxelizer on torch tensors, `PointToVoxel`.

One deterministic rule on every device: voxels in the order of their first point, points in input
order, the first `max_num_voxels` voxels and the first `max_num_points_per_voxel` points of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.arguments import expect_tensors
from ....errors import ContractError, DataTypeError
from ._voxel_fill import VoxelBuffers
from ._voxel_grid import GridError, PointDataTypeError, PointShapeError, VoxelGrid

__all__ = [
    "GridError",
    "PointDataTypeError",
    "PointShapeError",
    "PointToVoxel",
    "gather_features_by_pc_voxel_id",
    "voxelized",
]


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
        self._buffers = VoxelBuffers(grid, num_point_features, max_num_voxels, max_num_points_per_voxel, device)
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
    expect_tensors("PointToVoxel", pc=pc)
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
    expect_tensors("gather_features_by_pc_voxel_id", seg_res_features=seg_res_features, pc_voxel_id=pc_voxel_id)
    ids = pc_voxel_id.to(device=seg_res_features.device, dtype=torch.int64)
    absent = ids < 0
    tail = seg_res_features.shape[1:]
    if seg_res_features.shape[0] == 0 and bool(absent.all()):
        return seg_res_features.new_full((*ids.shape, *tail), invalid_value)
    rows = seg_res_features[ids.clamp(min=0)]
    mask = absent.view(*ids.shape, *(1 for _ in tail))
    return torch.where(mask, rows.new_tensor(invalid_value), rows)
