"""Pools in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.compile import handles
from ....core.compile.coordinates import Traced
from ....core.compile.library import define
from .. import batches
from ..grid import Key
from ..maps import MapRegistry
from .convolution import Kernel, layer_map
from .registered_maps import SCHEMA, as_results, flatten, graph_of, registered_map, wrap
from .rows import items

ops: Any = torch.ops.sparse_bridge


def pooled(module: Any, x: Any, mode: str, out_key: Key) -> torch.Tensor:
    """The features of a local pool, at the coordinates of `out_key` (of `graph_output_key`).

    mode: "sum", "avg" or "max"."""
    kernel = Kernel(module, True)
    handle, out = layer_map(x, kernel, out_key)
    rows = out.coords.shape[0]
    y: torch.Tensor
    if kernel.cells:
        y = ops.row_product(x._F, rows, handle, "sum" if kernel.transposed else mode)
    else:
        y = ops.pool(x._F, rows, handle, "first max" if mode == "max" else mode, 0.0, False)
    return y


def _origin(
    coords: torch.Tensor, handle: torch.Tensor, then: int, now: int, stride: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    x = registered_map(coords, handle, then, now, stride)
    return as_results(wrap(x.with_key(batches.origin(x.registry))), 1)


def _fake_origin(
    coords: torch.Tensor, handle: torch.Tensor, then: int, now: int, stride: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    n_items = torch.library.get_ctx().new_dynamic_size(min=1)
    return coords.new_empty((n_items, coords.shape[1])), handles.like()


define("minkowski_origin", f"({SCHEMA}) -> (Tensor, Tensor)", _origin, _fake_origin)


def pooled_globally(registry: MapRegistry, features: torch.Tensor, mode: str, key: Key) -> tuple[torch.Tensor, Key]:
    """(features, key) of a pool over batch items: rows by ascending batch index."""
    graph = graph_of(registry)
    glob = graph.origin
    if glob is None:
        coords, handle = ops.minkowski_origin(*flatten(graph.sites[key], key))
        glob = graph.origin = graph.free_key((0,) * len(key[0]))
        graph.sites[glob] = Traced(coords, handle, True)
    n_items = graph.sites[glob].coords.shape[0]
    y = ops.global_pool(features, items(registry, key, glob), n_items, mode)
    return y, glob
