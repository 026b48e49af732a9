"""Values of sparse voxels at points."""

from sparse_bridge.adapters.flex_gemm.grid_sample import GridSample3dFunction, grid_sample_3d

__all__ = ["GridSample3dFunction", "grid_sample_3d", "grid_sample_3d_torch", "set_hashmap_ratio"]

HASHMAP_RATIO = 2.0
grid_sample_3d_torch = grid_sample_3d


def set_hashmap_ratio(ratio):
    """Accepted; tables are sized by the engine."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio
