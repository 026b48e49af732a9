"""Voxelisation of point clouds."""

from sparse_bridge.adapters.spconv.upstream.voxelizer import (
    PointToVoxel,
    gather_features_by_pc_voxel_id,
)

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]
