"""Enumerations, keys and the quantisation functions of MinkowskiEngine's compiled module."""

import torch

from sparse_bridge.adapters.minkowski.maps import MapRegistry
from sparse_bridge.adapters.minkowski.upstream.enums import (
    BroadcastMode,
    ConvolutionMode,
    CoordinateMapType,
    GlobalPoolingMode,
    GPUMemoryAllocatorType,
    MemoryManagerBackend,
    MinkowskiAlgorithm,
    OperationType,
    PoolingMode,
    RegionType,
)
from sparse_bridge.adapters.minkowski.upstream.keys import CoordinateMapKey
from sparse_bridge.adapters.minkowski.upstream.quantize import quantize_labels, quantize_points
from sparse_bridge.adapters.minkowski.upstream.system import (
    cuda_version,
    cudart_version,
    get_gpu_memory_info,
    is_cuda_available,
)

__all__ = [
    "BroadcastMode", "ConvolutionMode", "CoordinateMapKey", "CoordinateMapManagerCPU",
    "CoordinateMapManagerGPU_c10", "CoordinateMapManagerGPU_default", "CoordinateMapType",
    "GPUMemoryAllocatorType", "GlobalPoolingMode", "MemoryManagerBackend", "MinkowskiAlgorithm",
    "OperationType", "PoolingMode", "RegionType", "cuda_version", "cudart_version",
    "get_gpu_memory_info", "is_cuda_available", "quantize_label_np", "quantize_label_th",
    "quantize_np", "quantize_th",
]  # fmt: skip

# Members are constants of the module too.
for _enum in (
    MinkowskiAlgorithm,
    GPUMemoryAllocatorType,
    CoordinateMapType,
    RegionType,
    PoolingMode,
    BroadcastMode,
):
    globals().update(_enum.__members__)


class CoordinateMapManagerCPU(MapRegistry):
    """Coordinate maps on the CPU."""


class CoordinateMapManagerGPU_default(MapRegistry):
    """Coordinate maps on a GPU."""


class CoordinateMapManagerGPU_c10(MapRegistry):
    """Coordinate maps on a GPU, with torch's allocator."""


def quantize_th(coordinates):
    """(unique rows, voxel of every row) of int32 coordinates [N, D + 1], int64."""
    return quantize_points(coordinates)


def quantize_np(coordinates):
    """`quantize_th` for int32 arrays."""
    first, inverse = quantize_points(torch.from_numpy(coordinates))
    return first.numpy(), inverse.numpy()


def quantize_label_th(coordinates, labels, invalid_label):
    """(unique rows, voxel of every row, label of every voxel)."""
    return quantize_labels(coordinates, labels, invalid_label)


def quantize_label_np(coordinates, labels, invalid_label):
    """`quantize_label_th` for int32 arrays."""
    found = quantize_labels(torch.from_numpy(coordinates), torch.from_numpy(labels), invalid_label)
    return tuple(part.int().numpy() for part in found)
