"""Kernel maps, parents and batch rows between the maps of a registry; each is built once."""

from __future__ import annotations

import torch

from ...core.maps import map_builder
from ...core.maps.kernel_map import KernelMap
from ...core.maps.lookup import find_rows
from ...errors import CoordinateError
from .errors import StrideError
from .geometry import Region, core_offsets
from .grid import Grid, common_unit, floor_to
from .registry import Key, MapRegistry

__all__ = ["batch_rows", "item_rows", "kernel_pairs", "parent_rows", "relation", "rows_of"]


def relation(registry: MapRegistry, in_key: Key, out_key: Key, region: Region) -> KernelMap:
    """y[u] gathers x[u + o * tensor stride of the input], for every offset o of the region."""
    memo = (in_key, out_key, region)
    found = registry.kernel_maps.get(memo)
    if found is None:
        x, y = registry.grid(in_key), registry.grid(out_key)
        found = registry.kernel_maps[memo] = _build(x, y, region)
    return found


def _build(x: Grid, y: Grid, region: Region) -> KernelMap:
    unit = x.unit if x is y else common_unit(x.unit, y.unit)
    offsets = core_offsets(region, tuple(t // u for t, u in zip(x.stride, unit, strict=True)))
    if x is y:
        return map_builder.submanifold(x.own_view(), offsets)
    stride = tuple(g // u for g, u in zip(y.unit, unit, strict=True))[::-1]
    return map_builder.between(x.view(unit), y.own_view(), offsets, stride)


def rows_of(grid: Grid, coords: torch.Tensor) -> torch.Tensor:
    """Row of every absolute integer coordinate [M, 1 + D] that lies on the grid's unit, else -1."""
    return find_rows(grid.own_view(), grid.query(coords, grid.unit))


def parent_rows(registry: MapRegistry, in_key: Key, out_key: Key) -> torch.Tensor:
    """int64 [N_in]: the row of `out_key` whose cell holds each row of `in_key`, -1 if it has none.

    Raises: StrideError if the tensor strides do not divide.
    """
    found = registry.parents.get((in_key, out_key))
    if found is None:
        x, y = registry.grid(in_key), registry.grid(out_key)
        if any(b == 0 or (a and b % a) for a, b in zip(x.stride, y.stride, strict=True)):
            raise StrideError(
                f"tensor strides {list(x.stride)} and {list(y.stride)}; the second must be a "
                "multiple of the first."
            )
        found = rows_of(y, floor_to(x.coords, y.stride))
        registry.parents[in_key, out_key] = found
    return found


def batch_rows(registry: MapRegistry, key: Key, origin: Key) -> torch.Tensor:
    """int64 [N]: the row of the map `origin` (one row per batch index) of every row of `key`."""
    memo = (key, origin)
    found = registry.batch_rows.get(memo)
    if found is None:
        batches = registry.grid(origin).coords[:, 0].long()
        ordered, order = torch.sort(batches)
        wanted = registry.grid(key).coords[:, 0].long()
        place = torch.searchsorted(ordered, wanted).clamp(max=max(0, len(ordered) - 1))
        found = order.index_select(0, place) if len(order) else place
        if len(wanted) and not (len(order) and bool((batches[found] == wanted).all())):
            raise CoordinateError(
                f"the map {origin} does not have one row for every batch index of {key}; "
                "a global tensor has one row per batch item."
            )
        registry.batch_rows[memo] = found
    return found


def item_rows(batch: torch.Tensor, n_items: int) -> list[torch.Tensor]:
    """Ascending rows of each batch index 0 .. n_items - 1, int64; batch: integer [N]."""
    order = torch.sort(batch.long(), stable=True).indices
    counts = torch.bincount(batch.long(), minlength=n_items)[:n_items]
    return list(order.split(counts.tolist()))


def kernel_pairs(kmap: KernelMap) -> dict[int, torch.Tensor]:
    """{offset: int32 [2, n]}, row 0 input and row 1 output rows, ascending in the output row;
    offsets without pairs are absent."""
    found = {}
    for v in range(kmap.n_offsets):
        in_rows, out_rows = kmap.pair_list(v)
        if len(in_rows):
            order = torch.sort(out_rows, stable=True).indices
            found[v] = torch.stack([in_rows[order], out_rows[order]]).int()
    return found
