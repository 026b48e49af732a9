"""Convolutions of spconv, on the core: one implementation behind the patches and the stand-in.

Functions take the layer itself and a `SparseConvTensor` of either kind and return one of the same
kind. The steady path, a layer whose `indice_key` has a map, is `layer_forward`, `convolved`, `_product`, then the core.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ...core.conv import convolution as core
from ...core.conv import epilogue as ends
from ...core.conv.deferred import features_of
from ...core.conv.epilogue import Epilogue, activated
from ...core.conv.layers import convolve_layer
from ...core.conv.plan import ConvForm
from ...core.device import trace
from ...core.maps.kernel_map import KernelMap
from ...core.maps.rows import rows_of
from ...core.ops.pointwise import linear_layer
from ...core.ops.trained_norms import profiled
from ...errors import ContractError, UnsupportedError
from ..call_stats import note
from ..warmup_registry import Expected, new_coordinates, pointwise, trains
from . import benchmark, keys
from .geometry import LayerGeometry, check_dimension
from .maps import LayerMap, layer_map_of
from .records import kernel_map_of, record_of
from .rules.switches import allow_tf32
from .tensors import channels_differ, check_input, check_parameters, shape_of

__all__ = [
    "ACTIVATIONS",
    "conv_forward",
    "convolve",
    "convolved",
    "expected",
    "expected_of",
    "layer_forward",
    "record_voxels",
]

_PLAIN = Epilogue()
# By the name of the enumeration.
ACTIVATIONS: dict[str, str | None] = {"None_": None}
ACTIVATIONS |= {row.module.__name__: row.name for row in ends.ACTIVATIONS.values() if row.act_type}


def conv_forward(
    layer: Any,
    training: bool,
    input: Any,
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
    """`SparseConvolutionBase._conv_forward`, with its arguments: every convolution of spconv.

    Raises the kinds of exception that the framework raises in the same situations: AssertionError
    for wrong use of a key or channel count, ValueError for geometry, RuntimeError for grids that
    vanish, even submanifold kernels, and dtypes or dimensions that do not go together.
    """
    if channel_scale is not None or output_scale is not None:
        raise UnsupportedError(
            f"{type(layer).__name__} was called with quantisation scales; int8 inference is not bridged."
        )
    keys.run_own_check(layer, input)
    epilogue = _epilogue(layer, training, bias, act_type, act_alpha)
    out = convolved(layer, input, weight, epilogue, (name, sparse_unique_name))
    return out if add_input is None else _added(out, add_input, epilogue)


def layer_forward(layer: Any, x: Any, weight: torch.Tensor, bias: torch.Tensor | None, add_input: Any = None) -> Any:
    """`conv_forward` with what the layer itself says."""
    epilogue = _epilogue(layer, layer.training, bias, layer.act_type, layer.act_alpha)
    out = convolved(layer, x, weight, epilogue, (layer.name, layer._sparse_unique_name))
    return out if add_input is None else _added(out, add_input, epilogue)


def _epilogue(layer: Any, training: bool, bias: torch.Tensor | None, act_type: Any, alpha: float) -> Epilogue:
    activation = ACTIVATIONS[getattr(act_type, "name", "None_")]
    if training and activation is not None:
        raise ContractError(f"{type(layer).__name__}: a fused {activation} is for inference; call .eval() first.")
    if bias is None and activation is None:
        return _PLAIN
    return Epilogue(bias, activation, alpha)


def _added(out: Any, add_input: Any, epilogue: Epilogue) -> Any:
    return out.replace_feature(activated(out.features + add_input.features, *epilogue[1:3]))


def convolved(layer: Any, x: Any, weight: torch.Tensor, epilogue: Epilogue, names: tuple[str | None, str]) -> Any:
    """The layer's output: checked, timed where the tensor asks for it, and counted.

    epilogue: bias, and what is fused behind it; a norm not for layers that are one matrix product.
    names: the layer's own and the one that a timer shows.
    """
    if torch.compiler.is_compiling():
        return _traced(layer, x, weight, epilogue, names)
    layer_name = type(layer).__name__
    features = check_input(x, layer_name)
    if features.shape[1] != layer.in_channels:
        raise channels_differ(layer, features)
    if features.dtype is not weight.dtype or features.device != weight.device:
        check_parameters(features, weight, layer_name)
    watch = benchmark.of_conv(x, layer, names[0]) if x.benchmark else None
    timer = x._timer
    if timer is None or not timer.enable:
        out = _product(layer, x, features, weight, epilogue, watch)
    else:
        with timer.record(names[1] or names[0] or layer_name):
            out = _product(layer, x, features, weight, epilogue, watch)
    if layer.record_voxel_count:
        record_voxels(layer, out.features)
    note("spconv", layer_name)
    return out


def _traced(layer: Any, x: Any, weight: torch.Tensor, epilogue: Epilogue, names: tuple[str | None, str]) -> Any:
    """`convolved` in a graph; where that cannot be, between two graphs."""
    from . import compiled

    if not compiled.served(x, layer):
        return compiled.outside(convolved, layer, x, weight, epilogue, names)
    if layer.conv1x1:
        return _pointwise(layer, x, check_input(x, type(layer).__name__), weight, epilogue.bias)
    learns = torch.is_grad_enabled()  # an activation that needs a gradient follows the product
    end = Epilogue(epilogue.bias) if learns else epilogue
    form = ConvForm("ovi", layer.groups, _precision(allow_tf32(), _sums(layer, x._features)))
    output = compiled.convolved(layer, x, weight, end, form)
    out = output.tensor(x, activated(output.features, *epilogue[1:3]) if learns else output.features)
    if layer.record_voxel_count:
        record_voxels(layer, out.features)
    return out


def _product(
    layer: Any,
    x: Any,
    features: torch.Tensor,
    weight: torch.Tensor,
    epilogue: Epilogue,
    watch: benchmark.Stopwatch | None,
) -> Any:
    if layer.conv1x1:
        return _pointwise(layer, x, features, weight, epilogue.bias)
    entries, record, weight = keys.find(layer, x, features, weight)
    if record is None:
        built = _new_map(layer, x)
        indices, shape, kmap = built.indices, built.shape, built.kmap
        if watch is not None:
            watch.built()
        if layer.indice_key is not None:
            entries[layer.indice_key] = record_of(x, layer, built)
    else:
        built_map = getattr(record, "_map", None)  # the framework's own records have none
        kmap = built_map if type(built_map) is KernelMap else kernel_map_of(record)
        indices, shape, kmap = _out_side(layer, record, kmap)
    form = form_of(layer.groups, allow_tf32(), _sums(layer, features))
    if torch.is_grad_enabled():
        y = _trained(layer, features, weight, kmap, epilogue, form)
    else:
        y = features_of(convolve_layer(layer, features, weight, kmap, epilogue, form))
    if watch is not None:
        watch.finish(int(y.shape[0]))
    return _output(x, y, indices, shape, entries)


def _trained(
    layer: Any, features: torch.Tensor, weight: torch.Tensor, kmap: KernelMap, epilogue: Epilogue, form: ConvForm
) -> torch.Tensor:
    return profiled(layer, _convolve(features, weight, epilogue, kmap, form))


def _out_side(layer: Any, record: Any, kmap: KernelMap) -> tuple[torch.Tensor, Any, KernelMap]:
    """(indices and grid of the output, the map as the layer reads it) of a map that is there."""
    if layer.inverse:
        return record.indices, record.spatial_shape, kmap.transposed()
    return record.out_indices, record.out_spatial_shape, kmap


def _output(x: Any, features: torch.Tensor, indices: torch.Tensor, shape: Any, entries: dict[Any, Any]) -> Any:
    """A tensor like `x` with what a convolution made of it.  entries: its maps."""
    out = x.replace_feature(features)
    out.indices, out.spatial_shape, out.indice_dict = indices, list(shape), entries
    return out


def _new_map(layer: Any, x: Any) -> LayerMap:
    check_dimension(layer, x)
    return layer_map_of(layer, x)


def convolve(
    features: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, kmap: KernelMap, groups: int = 1
) -> torch.Tensor:
    """[M, C_out]; an activation that needs a gradient follows the product."""
    return _convolve(features, weight, epilogue, kmap, form_of(groups, allow_tf32()))


def _convolve(
    features: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, kmap: KernelMap, form: ConvForm
) -> torch.Tensor:
    if epilogue.activation is not None and _learns(features, weight, epilogue.bias):
        y = core.convolve(features, weight, kmap, Epilogue(epilogue.bias), form)
        return activated(y, *epilogue[1:3])
    return core.convolve(features, weight, kmap, epilogue, form)


@functools.cache
def form_of(groups: int, tf32: bool, sums: str = "") -> ConvForm:
    return ConvForm("ovi", groups, _precision(tf32, sums))


def _precision(tf32: bool, sums: str) -> str:
    return sums or ("tf32" if tf32 else "ieee")


def _sums(layer: Any, features: torch.Tensor) -> str:
    """What a layer made with `fp32_accum` says of sums of fp16 products: "half" (False: leave to run in fp16) or
    "wide" (True: fp32 whatever torch's switch says); "" where it says nothing."""
    accum = getattr(layer, "fp32_accum", None)
    if accum is None or features.dtype is not torch.float16:
        return ""
    return "wide" if accum else "half"


def _learns(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _pointwise(layer: Any, x: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Kernel volume 1: the weight's memory is read as [C_in, C_out].

    A reshape and not a transpose, because published weights were trained so. Rows and keys stay.
    """
    matrix = weight.reshape(layer.in_channels, layer.out_channels)
    y = features_of(linear_layer(layer, features, matrix, bias))
    y = profiled(layer, y) if torch.is_grad_enabled() else y
    trace.emit_linear("mm", features.shape[0], layer.in_channels, layer.out_channels)
    out = x.replace_feature(y)
    out.spatial_shape = LayerGeometry.of(layer).output_shape(shape_of(x), type(layer).__name__)
    return out


def record_voxels(layer: Any, y: torch.Tensor) -> None:
    """Remember the most rows that a layer made, where it was built to."""
    if layer.record_voxel_count and hasattr(layer, "max_num_voxels_during_training"):
        n_rows = rows_of(y).require_host_count("recording the number of voxels")
        layer.max_num_voxels_during_training.clamp_(min=n_rows)


def expected(layer: Any, epilogue: Epilogue, norm: Any = None) -> Expected:
    """What this layer will ask the engine to multiply, for the warm-up.

    norm: what `fusion.training_norm_after` knows of the norm behind it.
    """
    odd = all(size % 2 for size in layer.kernel_size)
    unstrided = layer.subm or layer.inverse or layer.transposed
    return Expected(
        layer,
        layer.weight,
        "ovi",
        epilogue,
        layer.groups,
        layer.subm and odd,
        trains(layer.weight),
        "tf32" if allow_tf32() else "ieee",
        norm,
        strided=None if unstrided else new_coordinates(layer.kernel_size, layer.stride),
        expanding=layer.inverse or layer.transposed,
    )


def expected_of(layer: Any) -> Iterator[Expected]:
    """The product of a `SparseConvolution` on its own."""
    if layer.conv1x1:
        matrix = layer.weight.reshape(layer.in_channels, layer.out_channels)
        yield pointwise(layer, matrix, layer.bias)
    else:
        fused = None if layer.training else ACTIVATIONS[getattr(layer.act_type, "name", "None_")]
        yield expected(layer, Epilogue(layer.bias, fused, float(layer.act_alpha)))
