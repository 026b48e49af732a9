"""The voxelizer of points with 2 axes on a GPU."""

from sparse_bridge.adapters.spconv.upstream.point2voxel import Point2VoxelGPU2d as Point2Voxel

__all__ = ["Point2Voxel"]
