"""Joining samples into batches."""

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from sparse_bridge.adapters.minkowski import profile
from sparse_bridge.adapters.minkowski.grid import integral
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4
from sparse_bridge.core.arguments import expect_tensors
from sparse_bridge.errors import ContractError

__all__ = ["SparseCollation", "batch_sparse_collate", "batched_coordinates", "sparse_collate"]


def _tensor(value):
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def batched_coordinates(coords, dtype=torch.int32, device=None):
    """[N_i, D] coordinates of several samples -> [sum N_i, D + 1], sample number first.

    Args:
        coords: sequence of arrays or tensors; floats are floored for int32.
        dtype: torch.int32 or torch.float32.
        device: of the result; None for the CPU.

    Raises: ContractError (an AssertionError), CoordinateError (not finite, or beyond int32).
    """
    if not isinstance(coords, Sequence):
        raise ContractError("coords must be a sequence of arrays or tensors.")
    if dtype not in (torch.int32, torch.float32):
        raise ContractError(f"dtype is {dtype}; expected torch.int32 or torch.float32.")
    parts = [_tensor(part) for part in coords]
    if not parts or any(not isinstance(p, torch.Tensor) or p.ndim != 2 for p in parts):
        raise ContractError("coords must hold arrays or tensors [N, D].")
    dimensions = {part.shape[1] for part in parts}
    if len(dimensions) != 1:
        raise ContractError(f"coords of different dimensions {sorted(dimensions)}.")
    D = dimensions.pop()
    result = torch.zeros((sum(len(p) for p in parts), D + 1), dtype=dtype, device=device or "cpu")
    begin = 0
    for number, part in enumerate(parts):
        result[begin : begin + len(part), 1:] = integral(part) if dtype == torch.int32 else part
        result[begin : begin + len(part), 0] = number
        begin += len(part)
    return result


def _truncated(part):
    """Float coordinates as 0.4's collations make them integers: towards zero. Only where floors are
    others is it asked which release answers."""
    if not isinstance(part, torch.Tensor) or not part.is_floating_point():
        return part
    differs = bool((part.floor() != part.trunc()).any())
    return part.trunc() if differs and profile.is_old() else part


def _second_is_bool(*arguments):  # 0.4's is_double
    return isinstance(arguments[1], bool)


def _fourth_is_bool(*arguments):
    return isinstance(arguments[3], bool)


@arguments_of_0_4("coords feats labels is_double", recognised=_fourth_is_bool)
def sparse_collate(coords, feats, labels=None, dtype=torch.int32, device=None, *, is_double=False):
    """(coordinates [N, D + 1], features [N, C][, labels]) of several samples.

    Float coordinates are floored for int32; in 0.4 they are truncated.
    labels: concatenated if they are arrays or tensors, otherwise returned as a list.
    device: None for that of the first coordinates.  is_double: of 0.4, features in float64.
    Raises: ContractError (an AssertionError) where lengths differ, CoordinateError.
    """
    return _collate(coords, feats, labels, dtype, device, is_double)


def _collate(coords, feats, labels, dtype, device, is_double):
    with_labels = labels is not None
    if not isinstance(coords, Sequence) or not isinstance(feats, Sequence):
        raise ContractError("coords and feats must be sequences.")
    if len(coords) != len(feats) or (with_labels and len(labels) != len(coords)):
        raise ContractError("coords, feats and labels must have one entry per sample.")
    if not coords:
        raise ContractError("there are no samples; expected one or more.")
    coords = [_tensor(part) for part in coords]
    feats = [_tensor(part) for part in feats]
    expect_tensors("sparse_collate", **{f"feats[{item}]": part for item, part in enumerate(feats)})
    for c, f in zip(coords, feats, strict=True):
        if len(c) != len(f):
            raise ContractError(f"{len(f)} rows of features for {len(c)} coordinates.")
    if dtype == torch.int32:
        coords = [_truncated(part) for part in coords]
    if device is None and isinstance(coords[0], torch.Tensor):
        device = coords[0].device
    joined = batched_coordinates(coords, dtype=dtype, device=device)
    features = torch.cat(feats).to(joined.device)
    features = features.double() if is_double else features
    if not with_labels:
        return joined, features
    tensors = [_tensor(label) for label in labels]
    if all(isinstance(label, torch.Tensor) and label.ndim for label in tensors):
        return joined, features, torch.cat(tensors).to(joined.device)
    return joined, features, list(labels)


def _parts(samples, n_parts):
    """The parts of samples as one tuple each, `n_parts` empty ones without samples. Raises ContractError."""
    samples = list(samples)
    for sample in samples:
        if getattr(sample, "__len__", lambda: n_parts)() < n_parts or not isinstance(sample, Iterable):
            names = ", ".join(("coordinates", "features", "labels")[:n_parts])
            raise ContractError(f"a sample is a {type(sample).__name__} of too few parts; expected ({names}).")
    return list(zip(*samples, strict=True)) or [()] * n_parts


@arguments_of_0_4("data is_double", recognised=_second_is_bool)
def batch_sparse_collate(data, dtype=torch.int32, device=None, *, is_double=False):
    """`sparse_collate` of a list of (coordinates, features[, labels])."""
    coords, feats, *labels = _parts(data, 2)
    if len(labels) > 1:
        raise ContractError(f"samples of {2 + len(labels)} parts; expected (coordinates, features[, labels]).")
    return _collate(coords, feats, labels[0] if labels else None, dtype, device, is_double)


class SparseCollation:
    """A collate function for samples (coordinates, features, labels).

    limit_numpoints: samples that would take the batch beyond it are dropped; -1 for no limit.
    """

    @arguments_of_0_4("limit_numpoints is_double", recognised=_second_is_bool)
    def __init__(self, limit_numpoints=-1, dtype=torch.int32, device=None, *, is_double=False):
        self.is_double = is_double
        self.limit_numpoints = limit_numpoints
        self.dtype = dtype
        self.device = device

    def __call__(self, list_data):
        coords, feats, labels = _parts(list_data, 3)
        n_samples, total = 0, 0
        for part in coords:
            total += len(part)
            if 0 < self.limit_numpoints < total:
                logging.getLogger(__name__).warning(
                    "a batch of %d points was cut to its first %d of %d samples (limit %d)",
                    sum(len(p) for p in coords),
                    n_samples,
                    len(coords),
                    self.limit_numpoints,
                )
                break
            n_samples += 1
        return _collate(
            coords[:n_samples], feats[:n_samples], labels[:n_samples], self.dtype, self.device, self.is_double
        )
