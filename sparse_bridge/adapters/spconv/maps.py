"""Kernel maps of layers, from the index tensor of a SparseConvTensor."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch

from ...core.geometry.boxes import Box
from ...core.maps import map_cache
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import BuiltMap, MapRequest, request
from .. import providers  # noqa: F401 - maps are prefetched
from .geometry import LayerGeometry, request_of
from .rules.outside import warn_of_rows_outside
from .rules.row_order import order_of_layer
from .tensors import items_of, shape_of

_stores: weakref.WeakKeyDictionary[Any, MapStore] = weakref.WeakKeyDictionary()


class LayerMap(NamedTuple):
    """What a layer makes of the coordinates of its input.

    indices: int32 [M, 1 + nd] of the output, an object of ours that keeps the maps alive from layer
    to layer; the user's own tensor does not.  shape: the output's grid.  store: holds the map.
    """

    indices: torch.Tensor
    shape: list[int]
    kmap: KernelMap
    store: MapStore | None = None


def layer_map(
    indices: torch.Tensor, batch_size: int, shape: list[int], geometry: LayerGeometry, order: str, layer_name: str
) -> LayerMap:
    """The map of a layer on indices int32 [N, 1 + nd] in a grid of `shape`, built at most once.

    order: of new rows, see `row_order`.  layer_name: for messages.  Raises what
    `LayerGeometry` does, and CoordinateError.
    """
    store = map_cache.store_of(indices)
    built, out_shape = ask(store, indices, batch_size, shape, geometry, order, layer_name)
    if built.coords is None or built.store is None:
        return LayerMap(store.alias(indices), out_shape, built.kmap, store)
    return LayerMap(built.store.alias(built.coords.coords), out_shape, built.kmap, store)


def layer_map_of(layer: Any, x: Any) -> LayerMap:
    """The map of a layer on a tensor, whose maps live as long as it: a checkpoint runs the layers
    again when nothing else is left of them."""
    shape, geometry, order = shape_of(x), LayerGeometry.of(layer), order_of_layer(layer, x)
    built = layer_map(x.indices, items_of(x), shape, geometry, order, type(layer).__name__)
    if built.store is not None:
        _stores[x] = built.store
    return built


def ask(
    store: MapStore,
    indices: torch.Tensor,
    batch_size: int,
    shape: list[int],
    geometry: LayerGeometry,
    order: str,
    layer_name: str,
) -> tuple[BuiltMap, list[int]]:
    """The map of a layer on indices of which `store` holds the maps, and the output's grid."""
    map_request, box, out_shape = _request_of(geometry, order, batch_size, tuple(shape), layer_name)
    built = request(store, lambda: store.coordinates(indices, box), map_request)
    warn_of_rows_outside(store, indices, box)
    return built, list(out_shape)


def found_map(x: Any, geometry: LayerGeometry) -> KernelMap | None:
    """The map of a submanifold layer on a tensor, if it is there already."""
    store = map_cache.find_store(x.indices)
    if store is None:
        return None
    built = store.peek(_request_of(geometry, "given", items_of(x), tuple(shape_of(x)), "")[0])
    return None if built is None else built.kmap


@functools.lru_cache(maxsize=64)  # of a few scenes: streams bring grids of ever new sizes
def _request_of(
    geometry: LayerGeometry, order: str, batch_size: int, shape: tuple[int, ...], layer_name: str
) -> tuple[MapRequest, Box, list[int]]:
    """(a layer's request for a map in a grid, the grid's box, the output's grid)."""
    out_shape, box = geometry.output_shape(list(shape), layer_name), Box.grid(batch_size, shape)
    return MapRequest(*request_of(geometry, order), box), box, out_shape
