"""Layers that pick, copy or join rows in a graph: their rows are operators, the rest is torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.compile import handles
from ....core.compile.coordinates import Traced, least_rows
from ....core.compile.library import define
from ....errors import ShapeError
from ..batches import batch_rows
from ..grid import Key
from ..maps import MapRegistry
from ..points import interpolation_matrix
from .registered_maps import SCHEMA, as_results, flatten, graph_of, registered_map, together, wrap

ops: Any = torch.ops.sparse_bridge


def _items(
    coords: torch.Tensor,
    handle: torch.Tensor,
    then: int,
    now: int,
    stride: Sequence[int],
    glob_coords: torch.Tensor,
    glob_handle: torch.Tensor,
    glob_then: int,
    glob_now: int,
    glob_stride: Sequence[int],
) -> torch.Tensor:
    x = registered_map(coords, handle, then, now, stride)
    glob = registered_map(glob_coords, glob_handle, glob_then, glob_now, glob_stride)
    return batch_rows(together([x, glob]), x.key, glob.key).clone()


define(
    "minkowski_items",
    f"({SCHEMA}, Tensor glob_coords, Tensor glob_handle, SymInt glob_then, SymInt glob_now, "
    "int[] glob_stride) -> Tensor",
    _items,
    lambda coords, *ignored: coords.new_empty(coords.shape[0], dtype=torch.int64),
)


def items(registry: MapRegistry, key: Key, glob: Key) -> torch.Tensor:
    """int64 [N]: the row of the map `glob` of every row of `key`."""
    sites = graph_of(registry).sites
    rows: torch.Tensor = ops.minkowski_items(*flatten(sites[key], key), *flatten(sites[glob], glob))
    return rows


def broadcast(registry: MapRegistry, glob: torch.Tensor, key: Key, glob_key: Key) -> torch.Tensor:
    """The row of `glob` [B, C] of every row's batch item: [N, C]."""
    y: torch.Tensor = ops.spread(glob, items(registry, key, glob_key))
    return y


def _union(
    coords: Sequence[torch.Tensor],
    handle: Sequence[torch.Tensor],
    then: Sequence[int],
    now: Sequence[int],
    strides: Sequence[int],
    least: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    n_axes = len(strides) // len(coords)
    parts = [tuple(strides[i : i + n_axes]) for i in range(0, len(strides), n_axes)]
    maps = [registered_map(*registered) for registered in zip(coords, handle, then, now, parts, strict=True)]
    registry = together(maps)
    key, rows = registry.merged([registered.key for registered in maps])
    return *as_results(wrap(maps[0].with_key(key)), least), [part.clone() for part in rows]


def _fake_union(
    coords: Sequence[torch.Tensor],
    handle: Sequence[torch.Tensor],
    then: Sequence[int],
    now: Sequence[int],
    strides: Sequence[int],
    least: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    n_rows = torch.library.get_ctx().new_dynamic_size(min=least)
    rows = [part.new_empty(part.shape[0], dtype=torch.int64) for part in coords]
    return coords[0].new_empty((n_rows, coords[0].shape[1])), handles.like(), rows


define(
    "minkowski_union",
    "(Tensor[] coords, Tensor[] handle, SymInt[] then, SymInt[] now, int[] strides, int least) "
    "-> (Tensor, Tensor, Tensor[])",
    _union,
    _fake_union,
)


def merged(registry: MapRegistry, keys: list[Key]) -> tuple[Key, list[torch.Tensor], int]:
    """A new map of the union, its rows of every map's rows (int64), and how many it has."""
    graph = graph_of(registry)
    parts = [flatten(graph.sites[key], key) for key in keys]
    coords, handle, then, now, strides = ([part[i] for part in parts] for i in range(5))
    flat = [number for stride in strides for number in stride]
    least = least_rows(torch.is_grad_enabled())
    made_coords, made_handle, rows = ops.minkowski_union(coords, handle, then, now, flat, least)
    stride = tuple([min([key[0][axis] for key in keys]) for axis in range(len(keys[0][0]))])
    out = graph.free_key(stride, f"merge-{len(graph.sites)}")
    graph.sites[out] = Traced(made_coords, made_handle, True)
    return out, rows, made_coords.shape[0]


def _prune(
    coords: torch.Tensor,
    handle: torch.Tensor,
    then: int,
    now: int,
    stride: Sequence[int],
    mask: torch.Tensor,
    least: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = registered_map(coords, handle, then, now, stride)
    if mask.shape[0] != coords.shape[0]:
        raise ShapeError(f"MinkowskiPruning got a mask of shape {list(mask.shape)}; expected [{coords.shape[0]}].")
    rows = mask.nonzero().squeeze(1)
    key = x.registry.pruned(x.key, rows)
    return rows, *as_results(wrap(x.with_key(key)), least)


def _fake_prune(
    coords: torch.Tensor,
    handle: torch.Tensor,
    then: int,
    now: int,
    stride: Sequence[int],
    mask: torch.Tensor,
    least: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_rows = torch.library.get_ctx().new_dynamic_size(min=least)
    rows = mask.new_empty(n_rows, dtype=torch.int64)
    return rows, coords.new_empty((n_rows, coords.shape[1])), handles.like()


define("minkowski_prune", f"({SCHEMA}, Tensor mask, int least) -> (Tensor, Tensor, Tensor)", _prune, _fake_prune)


def pruned(registry: MapRegistry, features: torch.Tensor, mask: torch.Tensor, key: Key) -> tuple[torch.Tensor, Key]:
    """The rows where `mask` is set, and the key of their map."""
    graph, least = graph_of(registry), least_rows(torch.is_grad_enabled())
    rows, coords, handle = ops.minkowski_prune(*flatten(graph.sites[key], key), mask, least)
    out = graph.free_key(key[0], "pruned")
    graph.sites[out], graph.pruned[out] = Traced(coords, handle, True), True
    return features.index_select(0, rows), out


def _interpolation(
    coords: torch.Tensor, handle: torch.Tensor, then: int, now: int, stride: Sequence[int], query: torch.Tensor
) -> torch.Tensor:
    x = registered_map(coords, handle, then, now, stride)
    return handles.make(interpolation_matrix(x.registry.grid(x.key), query))


define("minkowski_interpolation", f"({SCHEMA}, Tensor query) -> Tensor", _interpolation, lambda *_: handles.like())


def interpolated(registry: MapRegistry, features: torch.Tensor, query: torch.Tensor, key: Key) -> torch.Tensor:
    """Features [M, C] at float positions [M, D + 1]."""
    sites = graph_of(registry).sites[key]
    matrix = ops.minkowski_interpolation(*flatten(sites, key), query)
    y: torch.Tensor = ops.row_product(features, query.shape[0], matrix, "sum")
    return y
