"""Values of sparse voxels at points."""

from sparse_bridge.adapters.flex_gemm.grid_sample import GridSample3dFunction, grid_sample_3d

__all__ = ["GridSample3dFunction", "grid_sample_3d"]
