"""Reading a layer's input and wrapping its output, for every kind of layer."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.conv_spec import Box
from ...core.kernel_map import KernelMap
from ...errors import DeviceError, ShapeError, UnsupportedError
from . import records

__all__ = ["box_of", "check_input", "output", "record_of"]


def box_of(x: Any) -> Box:
    size = (int(x.batch_size), *map(int, x.spatial_shape))
    return Box.of((0,) * len(size), size)


def check_input(x: Any, what: str) -> torch.Tensor:
    features = x.features
    if features.dtype == torch.qint8:
        raise UnsupportedError(
            f"{what} got int8 features; quantised inference is not bridged. Dequantise the tensor first."
        )
    if features.ndim != 2:
        raise ShapeError(f"{what} got features of shape {list(features.shape)}; expected [N, C].")
    if x.indices.device != features.device:
        raise DeviceError(
            f"{what} got features on {features.device} and indices on {x.indices.device}; move both to one device."
        )
    return features


def _native(algo: Any) -> bool:
    return getattr(algo, "name", None) == "Native"


def output(
    x: Any, features: torch.Tensor, indices: torch.Tensor, shape: list[int], entries: dict
) -> Any:
    out = x.replace_feature(features)
    out.indices = indices
    out.spatial_shape = shape
    out.indice_dict = entries
    return out


def allow_tf32() -> bool:
    """`spconv.constants.SPCONV_ALLOW_TF32`, which may be assigned at any time."""
    constants = sys.modules.get("spconv.constants")
    return constants is not None and bool(constants.SPCONV_ALLOW_TF32)


def record_of(
    x: Any, layer: Any, out_indices: torch.Tensor, shape: list[int], kmap: KernelMap, store: Any
) -> Any:
    core = sys.modules[type(x).__mro__[-2].__module__]
    values = {
        "out_indices": out_indices, "indices": x.indices, "spatial_shape": list(x.spatial_shape),
        "out_spatial_shape": shape, "is_subm": layer.subm, "algo": layer.algo, "ksize": list(layer.kernel_size),
        "stride": list(layer.stride), "dilation": list(layer.dilation), "padding": list(layer.padding),
    }  # fmt: skip
    return records.make_record(core, _native(layer.algo), values, kmap, store)
