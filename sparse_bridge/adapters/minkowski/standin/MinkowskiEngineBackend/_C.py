"""Enumerations, keys and the quantisation functions of MinkowskiEngine's compiled module."""

import torch

from sparse_bridge.adapters.minkowski import profile
from sparse_bridge.adapters.minkowski.errors import ArgumentValueError, TensorDeviceError
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
from sparse_bridge.adapters.minkowski.upstream.lists import listed_mean
from sparse_bridge.adapters.minkowski.upstream.quantize import quantize_labels, quantize_points
from sparse_bridge.adapters.minkowski.upstream.system import (
    cuda_version,
    cudart_version,
    get_gpu_memory_info,
    is_cuda_available,
)

__all__ = [
    "BroadcastMode",
    "ConvolutionMode",
    "CoordinateMapKey",
    "CoordinateMapManagerCPU",
    "CoordinateMapManagerGPU_c10",
    "CoordinateMapManagerGPU_default",
    "CoordinateMapType",
    "GPUMemoryAllocatorType",
    "GlobalPoolingMode",
    "MemoryManagerBackend",
    "MinkowskiAlgorithm",
    "OperationType",
    "PoolingMode",
    "RegionType",
    "cuda_version",
    "cudart_version",
    "get_gpu_memory_info",
    "is_cuda_available",
    "quantization_average_features",
    "quantize_label_np",
    "quantize_label_th",
    "quantize_np",
    "quantize_th",
]

# Members are constants of the module too; DEFAULT is that of the last one.
for _enum in (
    ConvolutionMode,
    MinkowskiAlgorithm,
    GPUMemoryAllocatorType,
    CoordinateMapType,
    RegionType,
    PoolingMode,
    BroadcastMode,
):
    globals().update(_enum.__members__)


class _OnOneKind(MapRegistry):
    """Coordinate maps on one kind of device."""

    _on_cpu = True

    def use_device(self, device):
        """Raises: TensorDeviceError for a device of the other kind."""
        if (device.type == "cpu") is not self._on_cpu:
            raise TensorDeviceError(
                f"coordinates on {device} for a coordinate manager of CoordinateMapType."
                f"{'CPU' if self._on_cpu else 'CUDA'}; move them, or leave coordinate_map_type out."
            )
        super().use_device(device)


class CoordinateMapManagerCPU(_OnOneKind):
    """Coordinate maps on the CPU."""


class CoordinateMapManagerGPU_c10(_OnOneKind):
    """Coordinate maps on a GPU, with torch's allocator."""

    _on_cpu = False


class CoordinateMapManagerGPU_default(CoordinateMapManagerGPU_c10):
    """Upstream's with an allocator of its own; here memory is always torch's."""


def quantize_th(coordinates):
    """(unique rows, voxel of every row) of int32 coordinates [N, D + 1], int64."""
    return quantize_points(coordinates)


def quantize_np(coordinates):
    """`quantize_th` for int32 arrays."""
    first, inverse = quantize_points(torch.from_numpy(coordinates))
    return first.numpy(), inverse.numpy()


def quantize_label_th(coordinates, labels, invalid_label):
    """(unique rows, voxel of every row, label of every voxel); in 0.4 (unique rows, labels)."""
    first, inverse, voted = quantize_labels(coordinates, labels, invalid_label)
    return (first, voted) if profile.is_old() else (first, inverse, voted)


def quantize_label_np(coordinates, labels, invalid_label):
    """`quantize_label_th` for int32 arrays."""
    results = quantize_label_th(torch.from_numpy(coordinates), torch.from_numpy(labels), invalid_label)
    return tuple(part.int().numpy() for part in results)


def quantization_average_features(features, in_map, out_map, out_nrows, mode=0):
    """0.4's means: features[in_map] averaged by out_map, [out_nrows, C]; 0 for rows without any.

    Raises: ArgumentValueError (a mode other than 0, the plain mean), FeatureShapeError.
    """
    if mode != 0:
        raise ArgumentValueError(f"mode is {mode!r}; 0, the plain mean, is the only one.")
    return listed_mean(out_map, in_map, (out_nrows, len(features)), features)[0]
