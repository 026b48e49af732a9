"""Layers of spconv while a program is traced: by `torch.compile`, or by `torch.export`.

The rules of keys, grids and dtypes run while the program is traced, and decide what the graph
holds: operators for maps and products. `indice_dict` carries what the graph knows of the maps: a
record under each key, and under `SITES` the coordinates of the tensor that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.compile import coordinates, handles, products
from ...core.compile import row_functions as row_functions  # registers operators
from ...core.compile.coordinates import BuilderResult, Sites, Traced
from ...core.conv.epilogue import Epilogue
from ...core.conv.plan import ConvForm
from ...core.maps.kernel_map import KernelMap
from ...core.traced.graphs import outside as outside
from . import keys
from .geometry import LayerGeometry, check_dimension
from .maps import ask
from .rules.row_order import ORDERS, order_of_layer
from .tensors import channels_differ, check_input, check_parameters, shape_of

ops: Any = torch.ops.sparse_bridge
SITES = "sparse_bridge.sites"
_BUILDER = "spconv"


class Record:
    """What a graph knows of a layer's map, in the form of spconv's own records.

    handle: of the kernel map.
    """

    def __init__(self, x: Any, layer: Any, sites: Traced, shape: list[int], handle: Any) -> None:
        self.indices, self.out_indices = x.indices, sites.coords
        self.spatial_shape, self.out_spatial_shape = list(x.spatial_shape), list(shape)
        self.is_subm, self.algo = layer.subm, layer.algo
        self.ksize, self.stride = list(layer.kernel_size), list(layer.stride)
        self.dilation, self.padding = list(layer.dilation), list(layer.padding)
        self.in_sites, self.out_sites, self.handle = sites_of(x), sites, handle

    @property
    def _map(self) -> KernelMap:  # for layers that run outside of the graph
        return handles.value_of(self.handle, KernelMap)


def sites_of(x: Any) -> Traced:
    """The coordinates of a traced tensor."""
    entry = x.indice_dict.get(SITES)
    if entry is not None and entry.coords is x.indices:
        sites: Traced = entry
        return sites
    return coordinates.entered(x.indices)


def build(sites: Sites, numbers: Sequence[int]) -> BuilderResult:
    """The map of a layer.  numbers: its geometry, see `LayerGeometry.numbers`, batch size and grid."""
    start = -1 - numbers[0]
    layer, (batch_size, *shape) = numbers[:start], numbers[start:]
    geometry, order = LayerGeometry.of_numbers(layer)
    built, _ = ask(sites.store, sites.coords, batch_size, shape, geometry, ORDERS[order], "a compiled layer")
    if built.coords is None or built.store is None:
        return BuilderResult(built.kmap)
    return BuilderResult(built.kmap, Sites(built.coords.coords, built.store))


coordinates.register(_BUILDER, build)


def served(x: Any, layer: Any) -> bool:
    """Whether the layer becomes operators: not for maps of layers that ran outside of a graph, nor
    where somebody measures, nor where a product must be taken in parts (`core.device.rocm`)."""
    if torch.version.hip is not None and getattr(layer, "conv1x1", False):
        return False
    record = None if layer.indice_key is None else x.indice_dict.get(layer.indice_key)
    return not x.benchmark and (record is None or isinstance(record, Record))


def _new_record(layer: Any, x: Any) -> Record:
    """A new map record, of a layer whose key has none."""
    layer_name = type(layer).__name__
    check_dimension(layer, x)
    geometry, shape = LayerGeometry.of(layer), shape_of(x)
    out_shape, sites = geometry.output_shape(shape, layer_name), sites_of(x)
    numbers = [*geometry.numbers(ORDERS.index(order_of_layer(layer, x))), x.batch_size, *shape]
    if geometry.subm:
        handle, out = sites.map(_BUILDER, numbers), sites
    else:
        handle, out = sites.new_map(_BUILDER, numbers, layer.training)
    return Record(x, layer, out, out_shape, handle)


class Answer(NamedTuple):
    """A layer's output: features, coordinates, grid and maps."""

    features: torch.Tensor
    sites: Traced
    shape: list[int]
    entries: dict[Any, Any]

    def tensor(self, x: Any, features: torch.Tensor) -> Any:
        """With other features, in the form of the layer's input."""
        out = x.replace_feature(features)
        out.indices, out.spatial_shape = self.sites.coords, list(self.shape)
        out.indice_dict = {**self.entries, SITES: self.sites}
        return out


def convolved(layer: Any, x: Any, weight: torch.Tensor, epilogue: Epilogue, form: ConvForm) -> Answer:
    """The output of a convolution."""
    layer_name = type(layer).__name__
    features, entries = check_input(x, layer_name), dict(x.indice_dict)
    if features.shape[1] != layer.in_channels:
        raise channels_differ(layer, features)
    if features.dtype is not weight.dtype or features.device != weight.device:
        check_parameters(features, weight, layer_name)
    key, inverse = layer.indice_key, layer.inverse
    record: Any = None if key is None else entries.get(key)
    if record is None and not inverse:
        record = _new_record(layer, x)
        if key is not None:
            entries[key] = record
    elif record is None or not keys.fits(layer, x, record, features):
        weight = keys.checked(layer, x, record, weight)
    sites, shape = record.out_sites, record.out_spatial_shape
    if inverse:
        sites, shape = record.in_sites, record.spatial_shape
    rows = sites.coords.shape[0]
    y = products.conv(features, weight, epilogue, record.handle, rows, form, inverse)
    return Answer(y, sites, shape, entries)


def pooled(layer: Any, x: Any, mode: str) -> Answer:
    """The output of a local pool."""
    features, entries = check_input(x, type(layer).__name__), dict(x.indice_dict)
    key, record = layer.indice_key, _new_record(layer, x)
    if key is not None:
        entries[key] = record
    sites = record.out_sites
    y = ops.pool(features, sites.coords.shape[0], record.handle, mode, 0.0, False)
    return Answer(y, sites, record.out_spatial_shape, entries)


def global_pool(features: torch.Tensor, x: Any, mode: str) -> torch.Tensor:
    """Maximum or mean of each batch item."""
    y: torch.Tensor = ops.global_pool(features, x.indices[:, 0], x.batch_size, mode)
    return y


def dense(x: Any, channels_first: bool) -> torch.Tensor:
    """`SparseConvTensor.dense()`."""
    sites = x.indice_dict.get(SITES)
    then = -1  # rows that no layer made may lie outside
    if sites is not None and sites.coords is x.indices and sites.from_layer:
        then = sites.version
    shape, now = [x.batch_size, *shape_of(x)], coordinates.version_of(x.indices)
    y: torch.Tensor = ops.to_dense(x._features, x.indices, shape, channels_first, False, then, now)
    return y
