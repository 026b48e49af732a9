"""Samples to batches."""

from collections.abc import Sequence

import numpy as np
import torch
from torchsparse.tensor import SparseTensor

from sparse_bridge.adapters.torchsparse import profile
from sparse_bridge.adapters.torchsparse.errors import SampleKeyError
from sparse_bridge.adapters.torchsparse.tensors import expect_sparse
from sparse_bridge.errors import ContractError, SparseInputError

__all__ = ["sparse_collate", "sparse_collate_fn"]


def sparse_collate(inputs):
    """One SparseTensor of several: rows one after another, the place in the list as batch index.

    The batch index becomes the first column (2.1) or the last one. numpy arrays in the samples are
    replaced by tensors in place.
    """
    if not isinstance(inputs, Sequence):
        raise SparseInputError(f"sparse_collate takes a list of SparseTensors, got {type(inputs).__name__}.")
    if not inputs:
        raise ContractError("sparse_collate got no samples; expected one or more.")
    expect_sparse("sparse_collate", *inputs)
    release = profile.current()
    coords, feats = [], []
    stride = inputs[0].stride
    for item, x in enumerate(inputs):
        if isinstance(x.coords, np.ndarray):
            x.coords = torch.tensor(x.coords)
        if isinstance(x.feats, np.ndarray):
            x.feats = torch.tensor(x.feats)
        if not isinstance(x.coords, torch.Tensor) or not isinstance(x.feats, torch.Tensor):
            raise ContractError(
                f"sample {item} holds {type(x.coords).__name__} coordinates and "
                f"{type(x.feats).__name__} features; expected arrays or tensors."
            )
        if x.stride != stride:
            raise ContractError(f"sample {item} has tensor stride {x.stride}, the first one {stride}; all must agree.")
        batch = torch.full((x.coords.shape[0], 1), item, dtype=torch.int32, device=x.coords.device)
        parts = [batch, x.coords] if release.batch_first else [x.coords, batch]
        coords.append(torch.cat(parts, 1))
        feats.append(x.feats)
    return SparseTensor(torch.cat(feats), torch.cat(coords), stride)


def sparse_collate_fn(inputs):
    """Collate dictionaries key by key; anything else than a list of dictionaries comes back as
    is."""
    if not inputs:
        raise ContractError("sparse_collate_fn got no samples; expected one or more.")
    if not isinstance(inputs[0], dict):
        return inputs
    output = {}
    for name, first in inputs[0].items():
        without = next((place for place, sample in enumerate(inputs) if name not in sample), None)
        if without is not None:
            raise SampleKeyError(f"sample {without} has no {name!r}, which the first one has; all need the same keys.")
        values = [sample[name] for sample in inputs]
        if isinstance(first, dict):
            output[name] = sparse_collate_fn(values)
        elif isinstance(first, np.ndarray):
            output[name] = torch.stack([torch.tensor(value) for value in values])
        elif isinstance(first, torch.Tensor):
            output[name] = torch.stack(values)
        elif isinstance(first, SparseTensor):
            output[name] = sparse_collate(values)
        else:
            output[name] = values
    return output
