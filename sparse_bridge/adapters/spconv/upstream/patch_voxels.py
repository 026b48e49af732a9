"""Seams of an installed spconv's voxelizers: our rules for its objects and their buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...base import Patch
from ._voxel_fill import VoxelBuffers, fill_with_mean
from ._voxel_grid import VoxelGrid
from .voxelizer import voxelized

Seam = Callable[..., Patch]


def _call(self: Any, pc: Any, clear_voxels: bool = True, empty_mean: bool = False) -> Any:
    return voxelized(VoxelBuffers.around(self), pc, clear_voxels, empty_mean, False)


def _with_id(self: Any, pc: Any, clear_voxels: bool = True, empty_mean: bool = False) -> Any:
    return voxelized(VoxelBuffers.around(self), pc, clear_voxels, empty_mean, True)


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor that looks at the grid first; spconv's wraps sizes or takes all memory."""

    @functools.wraps(original)
    def init(self: Any, vsize_xyz: Any, coors_range_xyz: Any, *args: Any, **kwargs: Any) -> None:
        VoxelGrid.from_xyz(vsize_xyz, coors_range_xyz)
        original(self, vsize_xyz, coors_range_xyz, *args, **kwargs)

    return init


def _empty_mean(self: Any, points: Any, clear_voxels: bool = True) -> Any:
    buffers = self.point_to_voxel(points, clear_voxels)
    voxels, _, used = (torch.from_numpy(part.numpy_view()) for part in buffers)
    fill_with_mean(voxels, used)
    return buffers


def voxel_patches(seam: Seam) -> list[Patch]:
    """seam: makes a patch of an owner, a name, a replacement, a reason and whether it wraps."""
    from spconv import utils as compiled
    from spconv.pytorch import utils

    first, leak = "the first points and voxels stay", "spconv's sums leak between voxels"
    grids = "grids that cannot be are refused"
    on_cpu = [getattr(compiled, f"Point2VoxelCPU{ndim}d") for ndim in (1, 2, 3, 4)]
    return [
        seam(utils.PointToVoxel, "__init__", _checked, grids),
        seam(utils.PointToVoxel, "__call__", _call, first, False),
        seam(utils.PointToVoxel, "generate_voxel_with_id", _with_id, first, False),
        *(seam(cls, "__init__", _checked, grids) for cls in on_cpu),
        *(seam(cls, "point_to_voxel_empty_mean", _empty_mean, leak, False) for cls in on_cpu),
    ]
