"""Kernel maps of layers, from the index tensor of a SparseConvTensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core.capture import prefetch
from ...core.geometry.boxes import Box
from ...core.maps import map_builder, map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from .geometry import LayerGeometry

__all__ = ["LayerMap", "layer_map"]


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
    indices: torch.Tensor, batch_size: int, shape: list[int], geometry: LayerGeometry, what: str
) -> LayerMap:
    """The map of a layer on indices int32 [N, 1 + nd] in a grid of `shape`, built at most once.

    what: the layer's name, for messages.  Raises what `LayerGeometry` does, and CoordinateError.
    """
    out_shape, offsets = geometry.output_shape(shape, what), geometry.offsets
    box, store = Box.grid(batch_size, shape), map_cache.store_of(indices)
    if geometry.subm:
        key = ("submanifold", box, offsets)
        kmap = store.get(key, lambda: _submanifold(store, _coordinates(store, indices, box), key))
        return LayerMap(store.alias(indices), out_shape, kmap, store)
    kind = "generative" if geometry.transposed else "strided"
    rule = (kind, box, offsets, geometry.stride, Box.grid(batch_size, out_shape))
    made, kmap = store.get(rule, lambda: _expanded(store, _coordinates(store, indices, box), rule))
    return LayerMap(made, out_shape, kmap, store)


def _coordinates(store: MapStore, indices: torch.Tensor, box: Box) -> CoordinateMap:
    return store.get(("coordinates", box), lambda: CoordinateMap(indices, box))


def _submanifold(store, cmap, key):  # type: ignore[no-untyped-def]
    kind, _, offsets = key
    build = lambda: map_builder.submanifold(cmap, offsets)  # noqa: E731
    return prefetch.resolve(store, cmap, build, kind, offsets)[0]


def _expanded(store, cmap, key):  # type: ignore[no-untyped-def]
    """(output indices, kernel map) of a layer with coordinates of its own."""
    (kind, _, *rule), trail = key, None
    if kind == "strided":
        build = lambda: map_builder.strided(cmap, *rule)  # noqa: E731
        (new, kmap), trail = prefetch.resolve(store, cmap, build, kind, *rule)
    else:
        new, kmap = map_builder.generative(cmap, *rule)
    # An object of its own: the store must not hold the tensor that keeps it alive.
    coords = new.coords
    coords = map_cache.normal_tensor(coords.clone if coords.is_inference() else coords.detach)
    made = MapStore()
    made.trail = trail
    made.put(("coordinates", rule[-1]), new)
    map_cache.adopt(coords, made)
    return coords, kmap
