"""Submanifold convolution of any dimension, as FlexGEMM's `dev/all_triton` names it."""

from sparse_bridge.adapters.flex_gemm.caches import SubMConvNeighborCache
from sparse_bridge.adapters.flex_gemm.conv import sparse_submanifold_conv3d
from sparse_bridge.adapters.flex_gemm.submanifold import sparse_submanifold_conv, sparse_submanifold_conv_any_offset

__all__ = [
    "SubMConvNeighborCache",
    "sparse_submanifold_conv",
    "sparse_submanifold_conv3d",
    "sparse_submanifold_conv_any_offset",
]
