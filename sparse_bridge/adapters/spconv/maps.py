"""From a SparseConvTensor's index tensor to coordinate and kernel maps."""

from __future__ import annotations

import torch

from ...core.capture import prefetch
from ...core.geometry.boxes import Box
from ...core.geometry.offsets import Offsets
from ...core.maps import map_builder, map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...errors import CoordinateError

__all__ = ["check_inside", "generative_map", "strided_map", "submanifold_map"]


class SiteRangeError(CoordinateError, IndexError):
    """A row that lies outside the grid it is to be written into."""


def check_inside(indices: torch.Tensor, box: Box) -> None:
    """Raise SiteRangeError where an index leaves -size <= index < size of `box`'s extents.

    Sites that a layer made or has read are known; others are looked at once.
    """
    store = map_cache.store_of(indices)
    sites = store.peek(("coordinates", box))
    if sites is None or sites.alive is not None:
        store.get(("inside", box), lambda: _look_inside(indices, box.size))


def _look_inside(indices: torch.Tensor, size: tuple[int, ...]) -> bool:
    limit = torch.tensor(size, device=indices.device)
    wrong = ((indices >= limit) | (indices < -limit)).nonzero()
    if wrong.shape[0]:
        row, column = wrong[0].tolist()
        name = "batch index" if column == 0 else f"axis {column - 1}"
        raise SiteRangeError(
            f"row {row} has {name} {int(indices[row, column])}, but the grid holds {size[column]} "
            f"({wrong.shape[0]} such entries); correct the indices or the grid first."
        )
    return True


def _coordinates(store: MapStore, indices: torch.Tensor, box: Box) -> CoordinateMap:
    return store.get(("coordinates", box), lambda: CoordinateMap(indices, box))


def submanifold_map(
    indices: torch.Tensor, box: Box, offsets: Offsets
) -> tuple[torch.Tensor, KernelMap, MapStore]:
    """(output indices, map, store). The output indices alias `indices` as an object of ours, which
    keeps the maps alive from layer to layer; the user's own tensor does not."""
    store = map_cache.store_of(indices)

    def make() -> KernelMap:
        cmap = _coordinates(store, indices, box)
        kmap, _ = prefetch.resolve(
            store, cmap, lambda: map_builder.submanifold(cmap, offsets), "submanifold", offsets
        )
        return kmap

    kmap = store.get(("submanifold", box, offsets), make)
    return store.alias(indices), kmap, store


def _expanded(kind: str, indices, box: Box, offsets: Offsets, stride, out_box: Box):  # type: ignore[no-untyped-def]
    store = map_cache.store_of(indices)

    def make() -> tuple[torch.Tensor, KernelMap]:
        cmap, trail = _coordinates(store, indices, box), None
        if kind == "strided":
            (new, kmap), trail = prefetch.resolve(
                store, cmap, lambda: map_builder.strided(cmap, offsets, stride, out_box), kind,
                offsets, stride, out_box,
            )  # fmt: skip
        else:
            new, kmap = map_builder.generative(cmap, offsets, stride, out_box)
        # An object of its own: the store must not hold the tensor that keeps it alive.
        coords = new.coords
        coords = map_cache.normal_tensor(coords.clone if coords.is_inference() else coords.detach)
        made = MapStore()
        made.trail = trail
        made.put(("coordinates", out_box), new)
        map_cache.adopt(coords, made)
        return coords, kmap

    coords, kmap = store.get((kind, box, offsets, stride, out_box), make)
    return coords, kmap, store


def strided_map(
    indices: torch.Tensor, box: Box, offsets: Offsets, stride: tuple[int, ...], out_box: Box
) -> tuple[torch.Tensor, KernelMap, MapStore]:
    """(output indices, map, store) of a regular convolution or pool."""
    return _expanded("strided", indices, box, offsets, stride, out_box)


def generative_map(
    indices: torch.Tensor, box: Box, offsets: Offsets, stride: tuple[int, ...], out_box: Box
) -> tuple[torch.Tensor, KernelMap, MapStore]:
    """(output indices, map, store) of a transposed convolution."""
    return _expanded("generative", indices, box, offsets, stride, out_box)
