"""The voxelizer of points with 3 axes on the CPU."""

from sparse_bridge.adapters.spconv.upstream.point2voxel import Point2VoxelCPU3d as Point2VoxelCPU

__all__ = ["Point2VoxelCPU"]
