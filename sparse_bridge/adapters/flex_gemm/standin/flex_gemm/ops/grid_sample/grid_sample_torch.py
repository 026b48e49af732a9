"""The variant of FlexGEMM in torch; here both are one."""

from sparse_bridge.adapters.flex_gemm.grid_sample import grid_sample_3d as grid_sample_3d_torch

__all__ = ["grid_sample_3d_torch"]
