"""Reading the tensors that layers take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.arguments import expect_tensors, refuse_arrays
from ...core.conv.convolution import autocast_dtype
from ...core.conv.deferred import materialize
from ...core.geometry.boxes import Box
from ...errors import (
    ContractError,
    DataTypeError,
    DeviceError,
    ShapeError,
    SparseInputError,
    UnsupportedError,
    tensor_expected,
)
from ..convert import kind_of

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class FeatureTypeError(DataTypeError, RuntimeError):
    """Features of a dtype that the layer does not take, or another than its weight's."""


def shape_of(x: Any) -> list[int]:
    """The spatial shape as Python ints, whatever kind of sequence was assigned."""
    shape = x.spatial_shape
    return list(map(int, shape.tolist() if hasattr(shape, "tolist") else shape))


def items_of(x: Any) -> int:
    """The number of batch items as a Python int. Raises DataTypeError for a float."""
    if isinstance(x.batch_size, float):
        raise DataTypeError(f"batch_size is {x.batch_size!r}; expected a whole number, such as int(batch_size).")
    return int(x.batch_size)


def box_of(x: Any) -> Box:
    """The cells a tensor may hold, batch first."""
    return Box.grid(items_of(x), shape_of(x))


def expect_sparse(caller: str, *inputs: Any) -> None:
    """Raises SparseInputError for one that is no SparseConvTensor, nor like one."""
    for x in inputs:
        if not (hasattr(x, "spatial_shape") and hasattr(x, "indices")):
            raise SparseInputError(f"{caller} takes a SparseConvTensor, got {kind_of(x, 'spconv')}.")


class TooFewTensorsError(SparseInputError, IndexError):
    """A layer over several sparse tensors got too few."""


def expect_sparse_list(caller: str, inputs: Any, least: int = 2) -> None:
    """Raises SparseInputError unless these are SparseConvTensors in a sequence, at least so many."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise SparseInputError(f"{caller} takes a list of SparseConvTensors, got {type(inputs).__name__}.")
    expect_sparse(caller, *inputs)
    if len(inputs) < least:
        raise TooFewTensorsError(
            f"{caller} takes {least} tensors or more, got a {type(inputs).__name__} of {len(inputs)}."
        )


def check_input(x: Any, layer_name: str) -> torch.Tensor:
    """The features [N, C] of a layer's input.

    Raises SparseInputError, UnsupportedError (int8), FeatureTypeError, ShapeError, DeviceError.
    """
    try:
        features: torch.Tensor = x._features
    except AttributeError:
        advice = " Derive the module that holds this layer from SparseModule, or use SparseSequential."
        raise SparseInputError(
            f"{layer_name} takes a SparseConvTensor, got {kind_of(x, 'spconv')}."
            + (advice if isinstance(x, torch.Tensor) else "")
        ) from None
    if type(features) is not torch.Tensor:
        features = materialize(features)
        expect_tensors(layer_name, features=features)
    if features.dtype == torch.qint8:
        raise UnsupportedError(
            f"{layer_name} got int8 features; quantised inference is not bridged. Dequantise the tensor first."
        )
    if features.dtype not in _FLOATS:
        raise FeatureTypeError(
            f"{layer_name} got features of {features.dtype}; expected fp16, bf16, fp32 or fp64 (use .float())."
        )
    if features.ndim != 2:
        raise ShapeError(f"{layer_name} got features of shape {list(features.shape)}; expected [N, C].")
    if getattr(x.indices, "device", None) != features.device:
        expect_tensors(layer_name, indices=x.indices)
        raise DeviceError(
            f"{layer_name} got features on {features.device} and indices on {x.indices.device}; "
            "move both to one device."
        )
    return features


def channels_differ(layer: Any, features: torch.Tensor) -> ContractError:
    """Features of another width than the layer takes."""
    return ContractError(
        f"channel size mismatch: {type(layer).__name__} takes {layer.in_channels} channels, its "
        f"input has {features.shape[1]}."
    )


def check_parameters(features: torch.Tensor, weight: torch.Tensor, layer_name: str) -> None:
    """Raise DeviceError or FeatureTypeError where features and weight do not go together."""
    if features.device != weight.device:
        raise DeviceError(
            f"{layer_name} has its weight on {weight.device}, its input is on {features.device}; "
            "move both to one device."
        )
    if features.dtype != weight.dtype and autocast_dtype(features.device) is None:
        raise FeatureTypeError(
            f"{layer_name} has a weight of {weight.dtype}, its input has {features.dtype}; "
            "convert one, or use torch.autocast."
        )


def summed_features(x: Any, other: Any) -> torch.Tensor:
    """Features of x + other, a sparse tensor or a plain one. Raises ContractError."""
    more = getattr(other, "_features", other)
    if not isinstance(more, torch.Tensor):
        refuse_arrays("SparseConvTensor", other=other)
        raise ContractError(f"a SparseConvTensor adds to another one or to a tensor, got {kind_of(other, 'spconv')}.")
    total: torch.Tensor = x._features + more
    return total


def add_in_place(x: Any, other: Any) -> Any:
    """`x += other`; tensors that share the features of `x` keep theirs."""
    x._features = summed_features(x, other)
    return x


def selected(x: Any, valid_indices: torch.Tensor) -> Any:
    """`x.select_by_index`: the chosen rows, with no kernel maps."""
    copied = x.replace_feature(x._features[valid_indices])
    copied.indices = x.indices[valid_indices]
    copied.indice_dict = {}
    return copied


def assign_features(x: Any, value: Any) -> None:
    """`x.features = value`, as spconv 1.x allows it. Raises DataTypeError for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise tensor_expected(value, "features", type(x).__name__)
    x._features = value
