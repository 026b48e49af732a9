"""Reading a layer's input and wrapping its output, for every kind of layer."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.capture import padded
from ...core.conv.convolution import autocast_dtype
from ...core.geometry.boxes import Box
from ...core.maps.kernel_map import KernelMap
from ...errors import DataTypeError, DeviceError, ShapeError, UnsupportedError
from . import records

__all__ = [
    "FeatureTypeError",
    "SparseInputError",
    "allow_tf32",
    "box_of",
    "check_input",
    "check_parameters",
    "output",
    "parameters_of",
    "record_of",
    "record_voxels",
    "shape_of",
]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SparseInputError(DataTypeError, AttributeError):
    """A layer got something else than a sparse tensor."""


class FeatureTypeError(DataTypeError, RuntimeError):
    """Features of a dtype that the layer does not take, or another than its weight's."""


def shape_of(x: Any) -> list[int]:
    """The spatial shape as Python ints, whatever kind of sequence was assigned."""
    shape = x.spatial_shape
    return list(map(int, shape.tolist() if hasattr(shape, "tolist") else shape))


def box_of(x: Any) -> Box:
    """The cells a tensor may hold, batch first."""
    return Box.grid(int(x.batch_size), shape_of(x))


def check_input(x: Any, what: str) -> torch.Tensor:
    """The features [N, C] of a layer's input.

    Raises SparseInputError, UnsupportedError (int8), FeatureTypeError, ShapeError, DeviceError.
    """
    try:
        features = x.features
    except AttributeError:
        raise SparseInputError(
            f"{what} takes a SparseConvTensor, got {type(x).__name__}. Derive the module that "
            "holds this layer from SparseModule, or use SparseSequential."
        ) from None
    if features.dtype in _FLOATS and features.ndim == 2 and x.indices.device == features.device:
        return features
    if features.dtype == torch.qint8:
        raise UnsupportedError(
            f"{what} got int8 features; quantised inference is not bridged. "
            "Dequantise the tensor first."
        )
    if features.dtype not in _FLOATS:
        raise FeatureTypeError(
            f"{what} got features of {features.dtype}; expected fp16, bf16, fp32 or fp64 "
            "(use .float())."
        )
    if features.ndim != 2:
        raise ShapeError(f"{what} got features of shape {list(features.shape)}; expected [N, C].")
    if x.indices.device != features.device:
        raise DeviceError(
            f"{what} got features on {features.device} and indices on {x.indices.device}; "
            "move both to one device."
        )
    return features


def parameters_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias. (Attributes of a module are looked up five times slower than its
    dictionaries; a weight that is computed is in none of them.)"""
    held = layer._parameters
    if "weight" in held and "bias" in held:
        return held["weight"], held["bias"]
    return layer.weight, layer.bias


def check_parameters(features: torch.Tensor, weight: torch.Tensor, what: str) -> None:
    """Raise DeviceError or FeatureTypeError where features and weight do not go together."""
    if features.device != weight.device:
        raise DeviceError(
            f"{what} has its weight on {weight.device}, its input is on {features.device}; "
            "move both to one device."
        )
    if features.dtype != weight.dtype and autocast_dtype(features.device) is None:
        raise FeatureTypeError(
            f"{what} has a weight of {weight.dtype}, its input has {features.dtype}; "
            "convert one, or use torch.autocast."
        )


def output(
    x: Any, features: torch.Tensor, indices: torch.Tensor, shape: list[int], entries: dict[Any, Any]
) -> Any:
    """A tensor like `x` with other features, sites, grid and kernel maps."""
    out = x.replace_feature(features)
    out.indices = indices
    out.spatial_shape = shape
    out.indice_dict = entries
    return out


def allow_tf32() -> bool:
    """`spconv.constants.SPCONV_ALLOW_TF32`, which may be assigned at any time."""
    constants = sys.modules.get("spconv.constants")
    return constants is not None and bool(constants.SPCONV_ALLOW_TF32)


def _namespace(x: Any) -> dict[str, Any]:
    """Globals of the module that defines `SparseConvTensor`: the record classes live beside it.

    Not through `sys.modules`, which may by now hold another spconv than the one `x` belongs to.
    """
    for base in type(x).__mro__:
        if base.__name__ == "SparseConvTensor":
            return base.__init__.__globals__  # type: ignore[misc]
    raise UnsupportedError(
        f"{type(x).__module__}.{type(x).__qualname__} is no SparseConvTensor; "
        "pass one, or a subclass."
    )


def record_voxels(layer: Any, y: torch.Tensor) -> None:
    """Remember the most rows that a layer made, where it was built to."""
    if layer.record_voxel_count and hasattr(layer, "max_num_voxels_during_training"):
        padded.forbid("Recording the number of voxels")
        layer.max_num_voxels_during_training.clamp_(min=y.shape[0])


def record_of(
    x: Any, layer: Any, out_indices: torch.Tensor, shape: list[int], kmap: KernelMap, store: Any
) -> Any:
    """The entry of `indice_dict` for a map that `layer` has just built on `x`."""
    values = {
        "out_indices": out_indices, "indices": x.indices, "spatial_shape": shape_of(x),
        "out_spatial_shape": list(shape), "is_subm": layer.subm, "algo": layer.algo,
        "ksize": list(layer.kernel_size), "stride": list(layer.stride),
        "dilation": list(layer.dilation), "padding": list(layer.padding),
    }  # fmt: skip
    native = getattr(layer.algo, "name", None) == "Native"
    return records.make_record(_namespace(x), native, values, kmap, store)
