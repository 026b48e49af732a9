"""From coordinate tensors to the neighbour caches of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.maps import map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.request import BuiltMap, MapRequest, request
from ...errors import DeviceError
from .. import providers  # noqa: F401 - maps are prefetched
from .caches import SparseConv3dNeighborCache, SubMConv3dNeighborCache
from .geometry import Strided, Triple, bounds_of, box_of, check_coords, grid_shape, row_major, same_offsets
from .options import row_order
from .serialize import ordered_by_code


def submanifold_cache(
    coords: torch.Tensor, shape: Sequence[int] | None, kernel: Triple, dilation: Triple, backward: bool = True
) -> SubMConv3dNeighborCache:
    """The cache of a submanifold layer over int32 coordinates [N, 4]; shape None: their bounds.

    Rows outside of the shape meet themselves alone; of equal rows the first one is everybody's
    neighbour.
    """
    check_coords(coords, "sparse_submanifold_conv3d")
    store = map_cache.store_of(coords)
    if shape is None:
        box = store.get("bounds", lambda: bounds_of(coords))
    else:
        batch, _, extents = grid_shape(shape)
        box = box_of(batch, extents)
    map_request = MapRequest("submanifold", same_offsets(kernel, dilation), box=box)
    built = request(store, lambda: store.coordinates(coords, box), map_request)
    cache = SubMConv3dNeighborCache.of(built.kmap, backward)
    cache.__dict__["_store"] = store
    return cache  # type: ignore[return-value]


def output_coordinates(
    coords: torch.Tensor, shape: Sequence[int], layer: Strided, order: int | None = None
) -> torch.Tensor:
    """Every cell of the output grid that an input reaches, int32 [M, 4].

    Ascending by (batch, x, y, z), or along the curve that `order` names, see `options.row_order`
    (None: that of the module).
    """
    outputs, extents = _outputs(coords, shape, layer)
    mode = row_order() if order is None else order
    assert outputs.coords is not None and outputs.store is not None
    if mode == 0:
        return outputs.store.alias(outputs.coords.coords)
    return ordered_by_code(outputs.coords.coords, (grid_shape(shape)[0], 1, *extents), mode)


def _outputs(coords: torch.Tensor, shape: Sequence[int], layer: Strided) -> tuple[BuiltMap, Triple]:
    """(the map to the output coordinates in row-major order, with those; the extents of the input grid)."""
    check_coords(coords, "sparse_conv3d")
    batch, _, extents = grid_shape(shape)
    store = map_cache.store_of(coords)
    box, out_box = box_of(batch, extents), box_of(batch, layer.extents(extents))

    def build() -> BuiltMap:
        order = "first_seen" if out_box.oversized else "ascending"
        map_request = MapRequest("strided", layer.offsets, layer.stride, layer, order, box)
        built = request(store, lambda: store.coordinates(coords, box), map_request)
        if order == "ascending":
            return built
        assert built.coords is not None
        out_map = CoordinateMap(row_major(built.coords.coords, out_box), out_box)
        out_map.adopt()
        return BuiltMap.of(built.kmap, out_map)

    def shown(built: BuiltMap) -> torch.Tensor | None:
        return None if built.coords is None else built.coords.coords

    return store.get(("outputs", box, layer), build, shown), extents


def strided_cache(
    coords: torch.Tensor, out_coords: torch.Tensor, shape: Sequence[int], layer: Strided, backward: bool = True
) -> SparseConv3dNeighborCache:
    """The cache between input and output coordinates, int32 [N, 4] and [M, 4].

    Outputs may repeat, and may lie outside of the output grid: they see what exists. Of equal
    inputs the first one counts.
    """
    check_coords(coords, "sparse_conv3d")
    check_coords(out_coords, "sparse_conv3d (out_coords)")
    if out_coords.device != coords.device:
        raise DeviceError(
            f"sparse_conv3d got coordinates on {coords.device} and out_coords on "
            f"{out_coords.device}; move both to one device."
        )
    batch, _, extents = grid_shape(shape)
    store, box = map_cache.store_of(coords), box_of(batch, extents)

    outputs, out_store = store.peek(("outputs", box, layer)), map_cache.store_of(out_coords)
    if outputs is not None and outputs.store is out_store:
        y_map = outputs.coords
    else:
        y_map = out_store.coordinates(out_coords, out_store.get("bounds", lambda: bounds_of(out_coords)))
    map_request = MapRequest("between", layer.offsets, layer.stride, y_map, box=box)
    kmap = request(store, lambda: store.coordinates(coords, box), map_request).kmap
    cache = SparseConv3dNeighborCache.of(kmap.of_first_rows(), backward)
    cache.__dict__["_store"] = store
    return cache  # type: ignore[return-value]
