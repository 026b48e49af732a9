"""What replaces layers of spconv while a network is traced for export."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..adapters.spconv.conv import ACTIVATIONS
from ..adapters.spconv.geometry import LayerGeometry
from ..adapters.spconv.tensors import shape_of
from ..core.conv.epilogue import activated
from . import nodes
from .plugin_checks import ExportError

_MASK_BITS = 32  # offsets that one word of a mask holds; the plugins read one


class _Pairs(NamedTuple):
    """Pairs of a layer in the graph, kept under its indice_key."""

    geometry: LayerGeometry
    tensors: tuple[torch.Tensor, ...]
    shape: list[int]
    lists: bool


def _checked(layer: Any, x: Any, weight: torch.Tensor) -> None:
    label = f"{type(layer).__name__}(indice_key={layer.indice_key!r})"
    if layer.inverse or layer.transposed:
        raise ExportError(
            f"{label}: Autoware's plugins have no inverse or transposed convolution; export the "
            "part of the network before it."
        )
    if layer.ndim != 3:
        raise ExportError(f"{label} has {layer.ndim} dimensions; Autoware's plugins take 3.")
    if layer.groups != 1:
        raise ExportError(f"{label} has {layer.groups} groups; Autoware's plugins take 1.")
    for name, tensor in (("features", x.features), ("the weight", weight)):
        if tensor.dtype != torch.float32:
            raise ExportError(
                f"{label}: {name} are {tensor.dtype}; export in float32 (model.float()), and "
                "with dtype=torch.float16 for a file in half precision."
            )
    if x.indices.dtype != torch.int32:
        raise ExportError(f"{label}: indices are {x.indices.dtype}; expected int32.")


def _by_lists(layer: Any, legacy: bool) -> bool:
    """Whether a layer goes by pair lists, which plugins build for submanifold layers only.

    Nodes of lists take no bias: layers with algo=Native go by tables, too, but in older files.
    """
    volume = math.prod(layer.kernel_size)
    native = legacy and layer.algo is not None and layer.algo.name == "Native"
    if layer.subm and (native or volume > _MASK_BITS):
        return True
    if volume > _MASK_BITS:
        raise ExportError(
            f"{type(layer).__name__} has {volume} kernel offsets; Autoware's plugins take at most "
            f"{_MASK_BITS} in layers that are not submanifold."
        )
    return False


class _Exporter:
    def __init__(self, do_sort: bool, legacy: bool) -> None:
        self._do_sort, self._legacy = do_sort, legacy

    def convolution(
        self,
        layer: Any,
        training: bool,
        x: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        add_input: Any = None,
        channel_scale: Any = None,
        output_scale: Any = None,
        name: str | None = None,
        sparse_unique_name: str = "",
        act_type: Any = None,
        act_alpha: float = 0,
        act_beta: float = 0,
    ) -> Any:
        """In place of `SparseConvolutionBase._conv_forward`."""
        _checked(layer, x, weight)
        if layer.conv1x1:  # one matrix product, whose weight is read as [C, K]
            matrix = weight.reshape(layer.in_channels, layer.out_channels)
            # torch.mm becomes Gemm, which takes the bias
            y = x.features @ matrix if self._legacy else torch.mm(x.features, matrix)
            pairs, entries = None, x.indice_dict
        else:
            pairs, entries = self._pairs(layer, x)
            y = self._product(layer, x.features, weight, pairs)
        if bias is not None:
            y = y + bias
        if add_input is not None:
            y = y + add_input.features
        out = x.replace_feature(_activated(y, act_type, act_alpha))
        if pairs is not None:
            out.indices, out.spatial_shape = pairs.tensors[0], list(pairs.shape)
            out.indice_dict = entries
        return out

    def _pairs(self, layer: Any, x: Any) -> tuple[_Pairs, dict[str, Any]]:
        geometry, key = LayerGeometry.of(layer), layer.indice_key
        cached = x.indice_dict.get(key) if key is not None else None
        if cached is not None:
            same = cached.geometry.kernel, cached.geometry.dilation, cached.geometry.subm
            if not layer.subm or same != (geometry.kernel, geometry.dilation, True):
                raise ExportError(
                    f"{type(layer).__name__}: indice_key {key!r} belongs to another geometry; only "
                    "submanifold layers of one kernel size share a key."
                )
            return cached, x.indice_dict
        shape, lists = shape_of(x), _by_lists(layer, self._legacy)
        algo = 0 if lists else 1
        attributes = nodes.attributes_of(geometry, int(x.batch_size), shape, algo)
        tensors: Any
        if lists:
            tensors = nodes.GetIndicePairs.apply(x.indices, attributes)
        else:
            attributes["is_train_i"] = 0
            if not self._legacy:
                attributes["do_sort_i"] = int(bool(self._do_sort))
            tensors = nodes.GetIndicePairsImplicitGemm.apply(x.indices, attributes)
        result = _Pairs(geometry, tensors, geometry.output_shape(shape, type(layer).__name__), lists)
        entries = dict(x.indice_dict)
        if key is not None:
            entries[key] = result
        return result, entries

    def _product(self, layer: Any, features: torch.Tensor, weight: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        subm, tensors = layer.subm, pairs.tensors
        product: Any
        if pairs.lists:
            product = nodes.IndiceConv.apply(features, weight, *tensors[1:4], subm)
            return product
        attributes = {
            "is_train_i": 0,
            "is_subm_i": int(subm),
            "act_alpha_f": 0.0,
            "act_beta_f": 0.0,
            "output_scale_f": 1.0,
            "output_add_scale_f": 0.0,
        }
        if layer.fp32_accum is not None:
            attributes["fp32_accum_i"] = int(layer.fp32_accum)
        product = nodes.ImplicitGemm.apply(features, weight, *tensors[1:4], attributes)
        return product


def _activated(y: torch.Tensor, act_type: Any, alpha: float) -> torch.Tensor:
    return activated(y, ACTIVATIONS[getattr(act_type, "name", "None_")], alpha)


def _dense(x: Any, channels_first: bool = True) -> Any:
    size = [int(x.batch_size), *shape_of(x)]
    channels = int(x.features.shape[1])
    return nodes.Dense.apply(x.features, x.indices, size, channels, channels_first)


def _no_pool(layer: Any, x: Any) -> Any:
    raise ExportError(
        f"{type(layer).__name__}: Autoware's plugins have no pooling; use a strided convolution, "
        "or export the part of the network before it."
    )


@contextlib.contextmanager
def as_in_files(model: nn.Module) -> Iterator[None]:
    """Strided layers have the algorithm of their nodes, which decides the order of new rows."""
    layers: Iterator[Any] = model.modules()
    native = [
        layer for layer in layers if getattr(getattr(layer, "algo", None), "name", None) == "Native" and not layer.subm
    ]
    try:
        for layer in native:
            layer.algo = type(layer.algo).MaskImplicitGemm
        yield
    finally:
        for layer in native:
            layer.algo = type(layer.algo).Native


@contextlib.contextmanager
def exporting(do_sort: bool, legacy: bool) -> Iterator[None]:
    """Layers of the spconv that is imported, real or stand-in, become nodes of `autoware`.

    do_sort, legacy: as of `export_onnx`.
    """
    conv, core, pool = (importlib.import_module(f"spconv.pytorch.{name}") for name in ("conv", "core", "pool"))
    exporter = _Exporter(do_sort, legacy)

    def convolution(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return exporter.convolution(layer, *args, **kwargs)

    replaced = [
        (conv.SparseConvolutionBase, "_conv_forward", convolution),
        (core.SparseConvTensor, "dense", _dense),
        *(
            (cls, "forward", _no_pool)
            for cls in (pool.SparseMaxPool, pool.SparseAvgPool, pool.SparseGlobalMaxOrAvgPool)
        ),
    ]
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
