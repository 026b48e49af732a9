"""Voxelisation of bare points, and hashes of coordinates."""

from collections.abc import Sequence

import numpy as np
import torch
from MinkowskiEngineBackend._C import (
    quantize_label_np,
    quantize_label_th,
    quantize_np,
    quantize_th,
)

from sparse_bridge.adapters.minkowski import profile
from sparse_bridge.adapters.minkowski.errors import ArgumentValueError
from sparse_bridge.adapters.minkowski.grid import integral
from sparse_bridge.adapters.minkowski.tensors import old_names
from sparse_bridge.adapters.minkowski.upstream.quantize import quantize_points
from sparse_bridge.errors import ContractError

__all__ = [
    "fnv_hash_vec", "quantize", "quantize_label", "ravel_hash_vec", "sparse_quantize",
    "unique_coordinate_map",
]  # fmt: skip

_FNV_START = np.uint64(14695981039346656037)
_FNV_FACTOR = np.uint64(1099511628211)


def fnv_hash_vec(arr):
    """FNV-1 hash of every row of an integer array [N, D]: uint64 [N]."""
    if arr.ndim != 2:
        raise ContractError(f"an array of shape {arr.shape}; expected [N, D].")
    columns = arr.astype(np.int64, copy=True).view(np.uint64)
    hashes = np.full(arr.shape[0], _FNV_START, dtype=np.uint64)
    for column in range(arr.shape[1]):
        hashes = hashes * _FNV_FACTOR
        hashes = np.bitwise_xor(hashes, columns[:, column])
    return hashes


def ravel_hash_vec(arr):
    """Row-major index of every row in the bounding box of an integer array [N, D]: uint64 [N]."""
    if arr.ndim != 2:
        raise ContractError(f"an array of shape {arr.shape}; expected [N, D].")
    shifted = (arr - arr.min(0)).astype(np.uint64, copy=False)
    extents = shifted.max(0).astype(np.uint64) + np.uint64(1)
    keys = np.zeros(arr.shape[0], dtype=np.uint64)
    for column in range(arr.shape[1] - 1):
        keys += shifted[:, column]
        keys *= extents[column + 1]
    return keys + shifted[:, -1]


def quantize(coords):
    """(unique rows, inverse) of integer coordinates, an array or tensor [N, D]."""
    if isinstance(coords, np.ndarray):
        return quantize_np(np.ascontiguousarray(coords, dtype=np.int32))
    if not isinstance(coords, torch.Tensor):
        raise ContractError("coords must be an array or a tensor.")
    return quantize_th(coords.int())


def quantize_label(coords, labels, ignore_label):
    """(unique rows, inverse, labels of the distinct coordinates); see `sparse_quantize`."""
    if isinstance(coords, np.ndarray):
        return quantize_label_np(
            np.ascontiguousarray(coords, dtype=np.int32),
            np.ascontiguousarray(labels, dtype=np.int32),
            ignore_label,
        )
    if not isinstance(coords, torch.Tensor):
        raise ContractError("coords must be an array or a tensor.")
    return quantize_label_th(coords.int(), labels, ignore_label)


def unique_coordinate_map(coordinates, tensor_stride=1):
    """(unique rows, inverse), int64, of int32 coordinates [N, D + 1]; the stride is a label."""
    return quantize_points(coordinates)


def _scaled(coordinates, size):
    """int32 voxels of coordinates in their own container's numbers, as a tensor."""
    if size is not None:
        if isinstance(size, (Sequence, np.ndarray, torch.Tensor)) and not isinstance(size, str):
            if len(size) != coordinates.shape[1]:
                raise ContractError(
                    f"quantization_size has {len(size)} entries for {coordinates.shape[1]} axes."
                )
            size = [float(s) for s in size]
            if isinstance(coordinates, torch.Tensor):
                size = torch.tensor(size, device=coordinates.device)
        elif not isinstance(size, (int, float, np.number)):
            raise ArgumentValueError(
                f"quantization_size is {size!r}; expected a number or one per axis."
            )
        coordinates = coordinates / size
    if isinstance(coordinates, np.ndarray):
        coordinates = torch.from_numpy(np.ascontiguousarray(coordinates))
    return integral(coordinates).contiguous()


def _check(coordinates, features, labels):
    if not isinstance(coordinates, (np.ndarray, torch.Tensor)) or coordinates.ndim != 2:
        raise ContractError("coordinates must be an array or a tensor [N, D].")
    for name, value in (("features", features), ("labels", labels)):
        if value is not None and len(value) != len(coordinates):
            raise ContractError(f"{len(value)} {name} for {len(coordinates)} coordinates.")
    if features is not None and features.ndim != 2:
        raise ContractError(f"features have shape {list(features.shape)}; expected [N, C].")


def sparse_quantize(
    coordinates=None, features=None, labels=None, ignore_label=-100, return_index=False,
    return_inverse=False, return_maps_only=False, quantization_size=None, device="cpu", **old,
):  # fmt: skip
    """Voxels of points [N, D] (no batch column): floor(coordinates / quantization_size), distinct.

    Args:
        coordinates: array or tensor.  features: [N, C].  labels: integers [N]; a voxel whose points
            disagree, or hold ignore_label, gets ignore_label.
        quantization_size: number or one per axis.  device: where to compute.

    Returns, in this order and as a bare value if it is the only one: coordinates, features,
        labels, unique_map (return_index), inverse_map (return_inverse). Without labels coordinates
        are always a torch.IntTensor and maps int64 tensors; with labels everything has the
        container of the input (numpy: int32). return_maps_only leaves the maps alone. In 0.4,
        without labels: the maps alone with return_index, and always the container of the input.
        Voxels are in the order of their first point.

    Raises: ContractError (an AssertionError), ArgumentValueError, CoordinateError (ValueErrors),
        CoordinateTypeError (a RuntimeError).
    """
    coordinates, features = old_names(
        "sparse_quantize", old, {"coords": "coordinates", "feats": "features"}, ("hash_type",),
        coordinates=coordinates, features=features,
    )  # fmt: skip
    _check(coordinates, features, labels)
    if return_inverse and not return_index:
        raise ContractError("return_inverse needs return_index.")
    voxels = _scaled(coordinates, quantization_size)
    if labels is not None:
        return _with_labels(
            coordinates, voxels, features, labels, ignore_label, return_index, return_inverse
        )
    voxels = voxels.to(device)
    first, inverse = quantize_points(voxels)
    if profile.is_old():
        maps = (first, inverse)
        return _old_result(coordinates, voxels, features, maps, return_index, return_inverse)
    maps = [first] * return_index + [inverse] * return_inverse
    if return_maps_only:
        return (first, inverse) if return_inverse else first
    found = [voxels[first]]
    if features is not None:
        found.append(_take(features, first))
    found += maps
    return found[0] if len(found) == 1 else tuple(found)


def _old_result(coordinates, voxels, features, maps, with_index, with_inverse):
    """0.4: the maps alone if they are asked for; everything in the container of the input."""
    first, inverse = maps
    if isinstance(coordinates, np.ndarray):
        voxels, first, inverse = (part.cpu().numpy() for part in (voxels, *maps))
    if with_index:
        return (first, inverse) if with_inverse else first
    if features is None:
        return voxels[first]
    return voxels[first], _take(features, torch.as_tensor(first))


def _take(features, rows):
    if isinstance(features, np.ndarray):
        return features[rows.cpu().numpy()]
    return features[rows.to(features.device)]


def _with_labels(coordinates, voxels, features, labels, ignore_label, with_index, with_inverse):
    if isinstance(coordinates, np.ndarray):
        array = voxels.numpy()
        first, inverse, voted = quantize_label_np(
            array, np.ascontiguousarray(labels, dtype=np.int32), ignore_label
        )
        found = [array[first]]
    else:
        if coordinates.is_cuda:
            raise ContractError("sparse_quantize with labels takes coordinates on the CPU.")
        first, inverse, voted = quantize_label_th(voxels, labels, ignore_label)
        found = [voxels[first]]
        voted = voted.long()
    if features is not None:
        found.append(features[first])
    found += [voted, *[first] * with_index, *[inverse] * with_inverse]
    return tuple(found)
