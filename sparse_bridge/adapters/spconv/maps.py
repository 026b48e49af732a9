"""Kernel maps of layers, from the index tensor of a SparseConvTensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core.geometry.boxes import Box
from ...core.maps import map_cache
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import MapRequest, request
from .. import providers  # noqa: F401 - maps are prefetched
from .geometry import LayerGeometry


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
    out_shape, box = geometry.output_shape(shape, what), Box.grid(batch_size, shape)
    store = map_cache.store_of(indices)
    if geometry.subm:
        asked = MapRequest("submanifold", geometry.offsets, box=box)
    else:
        kind = "generative" if geometry.transposed else "strided"
        out_box = Box.grid(batch_size, out_shape)
        asked = MapRequest(kind, geometry.offsets, geometry.stride, out_box, "first_seen", box)
    built = request(store, lambda: store.coordinates(indices, box), asked)
    if built.coords is None or built.store is None:
        return LayerMap(store.alias(indices), out_shape, built.kmap, store)
    return LayerMap(built.store.alias(built.coords.coords), out_shape, built.kmap, store)
