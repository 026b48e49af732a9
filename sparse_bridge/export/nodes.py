"""The nodes of the domain `autoware`, as torch functions: values from our engine, and a node each
in a graph that torch.onnx traces.

Inputs, outputs and attributes are those that Autoware's plugins declare and check
(`perception/autoware_tensorrt_plugins` of autoware_universe) and that TIER IV's exporter writes
(`projects/SparseConvolution` of AWML).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..adapters.spconv import functional, pairs
from ..adapters.spconv.conv import convolve
from ..adapters.spconv.geometry import LayerGeometry
from ..adapters.spconv.rules.row_order import is_original
from ..core.conv.epilogue import ACTIVATIONS, Epilogue

DOMAIN = "autoware"
# By `act_type` of a node.
_ACTIVATIONS = {row.act_type: row.name for row in ACTIVATIONS.values()} | {0: None}


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Out of the trace, which would take every size for a value of the graph.

    A trace knows values by their tensor objects, and maps are shared: results are objects of their
    own.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        state = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            result = function(*args)
            if isinstance(result, tuple):
                return tuple(tensor.detach() for tensor in result)
            return result.detach()
        finally:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]

    return run


def _typed(value: Any, like: Any, sizes: list[int | None]) -> None:
    value.setType(like.type().with_sizes(sizes))


def attributes_of(geometry: LayerGeometry, batch_size: int, shape: list[int], algo: int) -> dict[str, Any]:
    """What both nodes that make pairs say of their layer."""
    n_axes = len(shape)
    return {
        "batch_size_i": batch_size,
        "spatial_shape_i": shape,
        "algo_i": algo,
        "ksize_i": list(geometry.kernel),
        "stride_i": list(geometry.stride),
        "padding_i": list(geometry.padding),
        "dilation_i": list(geometry.dilation),
        "out_padding_i": list(geometry.output_padding) or [0] * n_axes,
        "subm_i": int(geometry.subm),
        "transpose_i": int(geometry.transposed),
    }


def torch_names(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a node by the names that torch.onnx writes them under."""
    return {f"{name}_i": value for name, value in attributes.items() if value is not None}


def _map(indices: torch.Tensor, attributes: dict[str, Any]) -> Any:
    kernel, stride, padding, dilation, out_padding = (
        tuple(attributes[f"{name}_i"]) for name in ("ksize", "stride", "padding", "dilation", "out_padding")
    )
    layer_type = bool(attributes["subm_i"]), bool(attributes["transpose_i"])
    geometry = LayerGeometry(kernel, stride, padding, dilation, out_padding, *layer_type)
    size, shape = attributes["batch_size_i"], attributes["spatial_shape_i"]
    return functional.build_map(indices, size, shape, geometry, attributes["algo_i"], original=is_original())


def pair_tables(
    indices: torch.Tensor, attributes: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """GetIndicePairsImplicitGemm: sites int32 [M, 4], pair_fwd int32 [V, M], pair_mask [M, 1],
    mask_argsort [M], and M as a scalar."""
    out, kmap = _map(indices, attributes)
    table, _ = pairs.tables_of(kmap)
    masks, order = pairs.masks_and_order(table, bool(attributes.get("do_sort_i", 1)))
    count = torch.tensor(len(out), dtype=torch.int32, device=out.device)
    return out, table, masks[:, :1].contiguous(), order, count


def pair_lists(
    indices: torch.Tensor, attributes: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """GetIndicePairs: sites int32 [M, 4], pairs int32 [2, V, N], their numbers [V], and M."""
    out, kmap = _map(indices, attributes)
    in_out_pairs, counts = pairs.indice_pairs(kmap, indices.shape[0], bool(attributes["subm_i"]))
    count = torch.tensor(len(out), dtype=torch.int32, device=out.device)
    return out, in_out_pairs, counts, count


def product_by_table(
    features: torch.Tensor,
    filters: torch.Tensor,
    pair_fwd: torch.Tensor,
    bias: torch.Tensor | None = None,
    act_type: int = 0,
    act_alpha: float = 0.0,
) -> torch.Tensor:
    """ImplicitGemm: [N, C] and KRSC -> [M, K]. act_type: of `ACTIVATIONS`, 0 none; act_alpha: its slope."""
    kmap = pairs.map_from_table(pair_fwd, features.shape[0], pair_fwd.shape[1])
    return convolve(features, filters, Epilogue(bias, _ACTIVATIONS[act_type], act_alpha), kmap)


def product_by_lists(
    features: torch.Tensor,
    filters: torch.Tensor,
    in_out_pairs: torch.Tensor,
    counts: torch.Tensor,
    n_out: int,
    subm: bool,
) -> torch.Tensor:
    """IndiceConv: [N, C] and KRSC -> [M, K]."""
    kmap = pairs.map_from_pairs(in_out_pairs, counts, features.shape[0], n_out, subm)
    return functional.convolution(features, filters, kmap)


def _map_node(g: Any, name: str, indices: Any, sizes: list[list[int | None]], attributes: dict[str, Any]) -> Any:
    """The outputs, of these sizes, of a node that builds a kernel map."""
    outputs = g.op(f"{DOMAIN}::{name}", indices, outputs=len(sizes), **attributes)
    for value, size in zip(outputs, sizes, strict=True):
        _typed(value, indices, size)
    return outputs


class GetIndicePairsImplicitGemm(torch.autograd.Function):
    @staticmethod
    def symbolic(g: Any, indices: Any, attributes: dict[str, Any]) -> Any:
        sizes: list[list[int | None]] = [[None, 4], [_volume(attributes), None], [None, 1], [None], []]
        return _map_node(g, "GetIndicePairsImplicitGemm", indices, sizes, attributes)

    @staticmethod
    @_untraced
    def forward(ctx: Any, indices: torch.Tensor, attributes: dict[str, Any]) -> Any:
        return pair_tables(indices, attributes)


class ImplicitGemm(torch.autograd.Function):
    @staticmethod
    def symbolic(
        g: Any, features: Any, filters: Any, pair_fwd: Any, masks: Any, order: Any, attributes: dict[str, Any]
    ) -> Any:
        output = g.op(f"{DOMAIN}::ImplicitGemm", features, filters, pair_fwd, masks, order, **attributes)
        _typed(output, features, [None, _first_size(filters)])
        return output

    @staticmethod
    @_untraced
    def forward(
        ctx: Any,
        features: torch.Tensor,
        filters: torch.Tensor,
        pair_fwd: torch.Tensor,
        masks: torch.Tensor,
        order: torch.Tensor,
        attributes: dict[str, Any],
    ) -> Any:
        return product_by_table(features, filters, pair_fwd)


class GetIndicePairs(torch.autograd.Function):
    @staticmethod
    def symbolic(g: Any, indices: Any, attributes: dict[str, Any]) -> Any:
        volume = _volume(attributes)
        sizes: list[list[int | None]] = [[None, 4], [2, volume, None], [volume], []]
        return _map_node(g, "GetIndicePairs", indices, sizes, attributes)

    @staticmethod
    @_untraced
    def forward(ctx: Any, indices: torch.Tensor, attributes: dict[str, Any]) -> Any:
        return pair_lists(indices, attributes)


class IndiceConv(torch.autograd.Function):
    @staticmethod
    def symbolic(g: Any, features: Any, filters: Any, in_out_pairs: Any, counts: Any, n_out: Any, subm: bool) -> Any:
        output = g.op(f"{DOMAIN}::IndiceConv", features, filters, in_out_pairs, counts, n_out, is_subm_i=int(subm))
        _typed(output, features, [None, _first_size(filters)])
        return output

    @staticmethod
    @_untraced
    def forward(
        ctx: Any,
        features: torch.Tensor,
        filters: torch.Tensor,
        in_out_pairs: torch.Tensor,
        counts: torch.Tensor,
        n_out: torch.Tensor,
        subm: bool,
    ) -> Any:
        return product_by_lists(features, filters, in_out_pairs, counts, int(n_out), subm)


class Dense(torch.autograd.Function):
    """Rows written into zeros, by nodes of ONNX itself; the zeros are no constant in the file."""

    @staticmethod
    def symbolic(g: Any, features: Any, indices: Any, size: list[int], channels: int, channels_first: bool) -> Any:
        shape = g.op("Constant", value_t=torch.tensor([*size, channels]))
        zeros = g.op("ConstantOfShape", shape, value_t=torch.zeros(1))
        sites = g.op("Cast", indices, to_i=7)  # int64, which ScatterND takes
        output = g.op("ScatterND", zeros, sites, features)
        n_axes = len(size) - 1
        sizes: list[int | None] = [*size, channels]
        if channels_first:
            output = g.op("Transpose", output, perm_i=[0, n_axes + 1, *range(1, n_axes + 1)])
            sizes = [size[0], channels, *size[1:]]
        _typed(output, features, sizes)
        return output

    @staticmethod
    @_untraced
    def forward(
        ctx: Any, features: torch.Tensor, indices: torch.Tensor, size: list[int], channels: int, channels_first: bool
    ) -> Any:
        output = features.new_zeros((*size, channels))
        output[tuple(indices.long().unbind(1))] = features
        return output.movedim(-1, 1).contiguous() if channels_first else output


def _first_size(value: Any) -> int | None:
    sizes = value.type().sizes()
    return None if sizes is None else sizes[0]


def _volume(attributes: dict[str, Any]) -> int:
    volume = 1
    for size in attributes["ksize_i"]:
        volume *= size
    return volume
