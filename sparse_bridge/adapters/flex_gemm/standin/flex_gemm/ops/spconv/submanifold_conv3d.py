"""Submanifold convolution."""

from sparse_bridge.adapters.flex_gemm.caches import SubMConv3dNeighborCache
from sparse_bridge.adapters.flex_gemm.conv import SubMConv3dFunction, sparse_submanifold_conv3d

__all__ = ["SubMConv3dFunction", "SubMConv3dNeighborCache", "sparse_submanifold_conv3d"]
