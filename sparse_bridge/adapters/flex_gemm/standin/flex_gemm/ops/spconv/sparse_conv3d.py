"""Strided convolution."""

from sparse_bridge.adapters.flex_gemm.caches import SparseConv3dNeighborCache
from sparse_bridge.adapters.flex_gemm.conv import SparseConv3dFunction, sparse_conv3d

__all__ = ["SparseConv3dFunction", "SparseConv3dNeighborCache", "sparse_conv3d"]
