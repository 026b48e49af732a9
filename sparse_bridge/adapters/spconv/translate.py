"""What a spconv layer does, on the core: one implementation behind the patches and the stand-in.

Functions take the layer's own attributes and a `SparseConvTensor` of either kind and return one of
the same kind.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.conv.convolution import conv
from ...core.conv.dataflows import Norm
from ...core.device import trace
from ...core.device.rocm import linear
from ...core.geometry.boxes import Box
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...errors import ContractError, UnsupportedError
from ..fusion import Tail
from ..ledger import note
from . import benchmark, geometry, maps, records
from .keys import check_algo, check_inverse, check_reuse, entries_of, fits, taps_of
from .layers import (
    allow_tf32,
    box_of,
    check_input,
    check_parameters,
    output,
    record_of,
    record_voxels,
    shape_of,
)

__all__ = ["ACTIVATIONS", "conv_forward"]

ACTIVATIONS = {"None_": None, "ReLU": "relu", "LeakyReLU": "leaky_relu", "Sigmoid": "sigmoid"}


def conv_forward(
    layer: Any, training: bool, x: Any, weight: torch.Tensor, bias: torch.Tensor | None,
    add_input: Any = None, channel_scale: Any = None, output_scale: Any = None,
    name: str | None = None, sparse_unique_name: str = "", act_type: Any = None,
    act_alpha: float = 0, act_beta: float = 0, *, tail: Tail | None = None,
) -> Any:  # fmt: skip
    """`SparseConvolutionBase._conv_forward`: every convolution of the framework.

    tail: a norm and activation that follow the layer, to be fused; not for kernel volume 1.

    Raises the kinds of exception that the framework raises in the same situations: AssertionError
    for wrong use of a key or channel count, ValueError for geometry, RuntimeError for grids that
    vanish, even submanifold kernels, and dtypes or dimensions that do not go together.
    """
    what = type(layer).__name__
    features = check_input(x, what)
    if features.shape[1] != layer.in_channels:
        raise ContractError(
            f"channel size mismatch: {what} takes {layer.in_channels} channels, its input has "
            f"{features.shape[1]}."
        )
    if channel_scale is not None or output_scale is not None:
        raise UnsupportedError(
            f"{what} was called with quantisation scales; int8 inference is not bridged."
        )
    if tail is None:
        activation = ACTIVATIONS[getattr(act_type, "name", "None_")]
    else:
        activation, act_alpha = tail.activation, tail.alpha
    if training and activation is not None:
        raise ContractError(f"{what}: a fused {activation} is for inference; call .eval() first.")
    check_parameters(features, weight, what)
    watch = benchmark.of_conv(x, layer, name) if x.benchmark else None
    norm = None if tail is None else tail.values
    timer = x._timer
    if timer is None or not timer.enable:
        out = _run(layer, x, features, weight, bias, activation, act_alpha, norm, watch)
    else:
        with benchmark.timed(x, sparse_unique_name or name or what):
            out = _run(layer, x, features, weight, bias, activation, act_alpha, norm, watch)
    if add_input is not None:
        summed = out.features + add_input.features
        out = out.replace_feature(_activate(summed, activation, act_alpha))
    if layer.record_voxel_count:
        record_voxels(layer, out.features)
    note("spconv", what)
    return out


def _activate(value: torch.Tensor, activation: str | None, alpha: float) -> torch.Tensor:
    if activation == "relu":
        return value.relu()
    if activation == "leaky_relu":
        return torch.nn.functional.leaky_relu(value, alpha)
    return value.sigmoid() if activation == "sigmoid" else value


def _pointwise(
    layer: Any, x: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    """Kernel volume 1: the weight's memory is read as [C_in, C_out].

    A reshape and not a transpose, because published weights were trained so. Rows and keys stay.
    """
    matrix = weight.reshape(layer.in_channels, layer.out_channels)
    y = linear(features, matrix, bias)
    trace.emit_linear("mm", features.shape[0], layer.in_channels, layer.out_channels)
    out = x.replace_feature(y)
    out.spatial_shape = _output_shape(layer, shape_of(x))
    return out


def _output_shape(layer: Any, shape: list[int]) -> list[int]:
    if layer.subm:
        return shape
    if layer.transposed:
        size = geometry.deconv_output_size(
            shape,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.output_padding,
        )
    else:
        size = geometry.conv_output_size(
            shape, layer.kernel_size, layer.stride, layer.padding, layer.dilation
        )
    geometry.check_output_size(size, type(layer).__name__, shape)
    return size


def _run(
    layer: Any, x: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, alpha: float, norm: Norm | None, watch: benchmark.Stopwatch | None,
) -> Any:  # fmt: skip
    if layer.conv1x1:
        return _pointwise(layer, x, features, weight, bias)
    return _convolve(layer, x, features, weight, bias, activation, alpha, norm, watch)


def _convolve(
    layer: Any, x: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, alpha: float, norm: Norm | None, watch: benchmark.Stopwatch | None,
) -> Any:  # fmt: skip
    key = layer.indice_key
    record = x.find_indice_pair(key)
    fitting = record is not None and fits(layer, x, record, features)
    if not fitting:
        geometry.check_dimension(layer, x)
        if record is not None:
            check_algo(layer, record)
    entries = entries_of(x)
    if layer.inverse:
        if not fitting:
            check_inverse(layer, x, record)
        kmap = records.kernel_map_of(record).transposed()
        indices, shape = record.indices, list(record.spatial_shape)
    elif record is not None:
        if not fitting:
            check_reuse(layer, x, record)
            weight = taps_of(weight, layer, record)
        kmap = records.kernel_map_of(record)
        indices, shape = record.out_indices, list(record.out_spatial_shape)
    else:
        shape = _output_shape(layer, shape_of(x))
        indices, kmap, store = _new_map(layer, x, shape)
        if watch is not None:
            watch.built()
        if key is not None:
            entries[key] = record_of(x, layer, indices, shape, kmap, store)
    fused = activation
    if (
        activation is not None
        and torch.is_grad_enabled()
        and (
            features.requires_grad
            or weight.requires_grad
            or (bias is not None and bias.requires_grad)
        )
    ):
        fused = None
    y = conv(
        features, weight, bias, kmap, layout="ovi", groups=layer.groups, activation=fused,
        alpha=alpha, norm=norm, allow_tf32=allow_tf32(),
    )  # fmt: skip
    if fused is not activation:
        y = _activate(y, activation, alpha)
    if watch is not None:
        watch.finish(int(y.shape[0]))
    return output(x, y, indices, shape, entries)


def _new_map(layer: Any, x: Any, shape: list[int]) -> tuple[torch.Tensor, KernelMap, MapStore]:
    box = box_of(x)
    kernel, dilation = tuple(layer.kernel_size), tuple(layer.dilation)
    if layer.subm:
        return maps.submanifold_map(x.indices, box, geometry.submanifold_offsets(kernel, dilation))
    offsets = geometry.strided_offsets(kernel, dilation, tuple(layer.padding))
    out_box = Box.grid(box.size[0], shape)
    build = maps.generative_map if layer.transposed else maps.strided_map
    return build(x.indices, box, offsets, tuple(layer.stride), out_box)
