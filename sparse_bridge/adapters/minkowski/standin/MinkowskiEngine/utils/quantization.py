"""Voxelisation of bare points, and hashes of coordinates."""

from collections.abc import Sequence

import numpy as np
import torch
from MinkowskiEngineBackend._C import quantize_label_np, quantize_label_th, quantize_np, quantize_th

from sparse_bridge.adapters.minkowski import profile
from sparse_bridge.adapters.minkowski.errors import ArgumentValueError, CoordinateTypeError
from sparse_bridge.adapters.minkowski.grid import integral
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.adapters.minkowski.upstream.quantize import quantize_labels, quantize_points
from sparse_bridge.errors import ContractError

__all__ = ["fnv_hash_vec", "quantize", "quantize_label", "ravel_hash_vec", "sparse_quantize", "unique_coordinate_map"]

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
    """(unique rows, inverse, labels of the distinct coordinates); in 0.4 without inverse. See
    `sparse_quantize`."""
    if isinstance(coords, np.ndarray):
        return quantize_label_np(
            np.ascontiguousarray(coords, dtype=np.int32), np.ascontiguousarray(labels, dtype=np.int32), ignore_label
        )
    if not isinstance(coords, torch.Tensor):
        raise ContractError("coords must be an array or a tensor.")
    return quantize_label_th(coords.int(), labels, ignore_label)


def unique_coordinate_map(coordinates, tensor_stride=1):
    """(unique rows, inverse), int64, of int32 coordinates [N, D + 1]; the stride is a label."""
    return quantize_points(coordinates)


def _sizes(size, dimension):
    """A number, or one per axis as a list; positive. Raises: ArgumentValueError, ContractError."""
    if isinstance(size, (np.ndarray, torch.Tensor)) and size.ndim == 0:
        size = size.item()
    wrong = ArgumentValueError(f"quantization_size is {size!r}; expected a positive number or one per axis.")
    if isinstance(size, (Sequence, np.ndarray, torch.Tensor)) and not isinstance(size, str):
        if len(size) != dimension:
            raise ContractError(f"quantization_size has {len(size)} entries for {dimension} axes.")
        try:
            size = [float(s) for s in size]
        except (TypeError, ValueError, RuntimeError):
            raise wrong from None
    elif not isinstance(size, (int, float, np.number)):
        raise wrong
    if not all(0 < s < np.inf for s in (size if isinstance(size, list) else [size])):
        raise wrong
    return size


def _scaled(coordinates, size):
    """int32 voxels of coordinates in their own container's numbers, as a tensor."""
    if size is not None:
        size = _sizes(size, coordinates.shape[1])
        if isinstance(size, list) and isinstance(coordinates, torch.Tensor):
            size = torch.tensor(size, device=coordinates.device)
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


def _has_size(*arguments):
    """Whether 0.4's quantization_size stands where 0.5 takes return_maps_only."""
    return len(arguments) > 6 and not isinstance(arguments[6], (bool, np.bool_, type(None)))


@arguments_of_0_4(
    "coords=coordinates feats=features labels ignore_label return_index return_inverse quantization_size",
    also="hash_type",
    recognised=_has_size,
)
def sparse_quantize(
    coordinates,
    features=None,
    labels=None,
    ignore_label=-100,
    return_index=False,
    return_inverse=False,
    return_maps_only=False,
    quantization_size=None,
    device="cpu",
):
    """Voxels of points [N, D] (no batch column): floor(coordinates / quantization_size), distinct.

    Args:
        coordinates: array or tensor.  features: [N, C].  labels: integers [N]; a voxel whose points
            disagree, or hold ignore_label, gets ignore_label.
        quantization_size: number or one per axis.  device: where to compute.

    Returns, in this order and as a bare value if it is the only one: coordinates, features,
        labels, unique_map (return_index), inverse_map (return_inverse). Without labels coordinates
        are always a torch.IntTensor and maps int64 tensors; with labels everything has the
        container of the input (numpy: int32). return_maps_only leaves the maps alone.
        In 0.4 always the container of the input, and with return_index: the maps alone, or
        (unique_map, labels). Voxels are in the order of their first point.

    Raises: ContractError (an AssertionError), ArgumentValueError, CoordinateError (ValueErrors),
        CoordinateTypeError (a RuntimeError).
    """
    _check(coordinates, features, labels)
    if return_inverse and not return_index:
        raise ContractError("return_inverse needs return_index.")
    voxels, voted = _scaled(coordinates, quantization_size).to(device), None
    if labels is None:
        first, inverse = quantize_points(voxels)
    else:
        labels = _int_labels(coordinates, labels).to(device)
        first, inverse, voted = quantize_labels(voxels, labels, ignore_label)
    # containers and dtypes
    arrays = isinstance(coordinates, np.ndarray) and (labels is not None or profile.is_old())

    def out(part):
        if arrays:
            return (part if labels is None else part.int()).cpu().numpy()
        return part.long() if part is voted else part

    maps = [out(first), out(inverse)] if return_inverse else [out(first)]
    if return_maps_only:
        outputs = maps
    elif return_index and profile.is_old():
        outputs = maps if voted is None else [maps[0], out(voted)]
    else:
        outputs = [out(voxels[first])]
        outputs += [] if features is None else [_take(features, first)]
        outputs += [] if voted is None else [out(voted)]
        outputs += maps if return_index else []
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _int_labels(coordinates, labels):
    """Labels as a tensor: those of arrays as int32. Raises: ContractError, CoordinateTypeError."""
    if isinstance(coordinates, np.ndarray):
        array = np.asarray(labels)
        cast = np.ascontiguousarray(array, dtype=np.int32)
        if not np.array_equal(cast, array):
            raise ContractError("labels must be integers of 32 bits.")
        return torch.from_numpy(cast)
    if coordinates.is_cuda:
        raise ContractError("sparse_quantize with labels takes coordinates on the CPU.")
    if not isinstance(labels, torch.Tensor):
        raise CoordinateTypeError(f"labels are {type(labels).__name__}; expected a torch.IntTensor, like coordinates.")
    return labels


def _take(features, rows):
    if isinstance(features, np.ndarray):
        return features[rows.cpu().numpy()]
    return features[rows.to(features.device)]
