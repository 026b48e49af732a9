"""Local and global pooling layers of spconv, on the core."""

from __future__ import annotations

from typing import Any

import torch

from ...core.geometry.boxes import Box
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...core.ops import pool as core_pool
from ..ledger import note
from . import benchmark, geometry, maps
from .keys import KeyTakenError, entries_of
from .layers import box_of, check_input, output, record_of, record_voxels, shape_of

__all__ = ["avg_pool_forward", "global_pool_forward", "max_pool_forward"]


def max_pool_forward(layer: Any, x: Any) -> Any:
    """Local max pooling, at least 0 as in spconv; the gradient goes to every input that ties."""
    return _pool(layer, x, "max")


def avg_pool_forward(layer: Any, x: Any) -> Any:
    """Mean over the active inputs of each window."""
    return _pool(layer, x, "avg")


def _pool(layer: Any, x: Any, mode: str) -> Any:
    what, key = type(layer).__name__, layer.indice_key
    features = check_input(x, what)
    geometry.check_dimension(layer, x)
    if key is not None and x.find_indice_pair(key) is not None:
        raise KeyTakenError(f"{what}: indice_key {key!r} exists already; pools never reuse a key.")
    watch = None
    if x.benchmark:
        watch = benchmark.of_pool(x, layer, "SparseMaxPool" if mode == "max" else "SparseAvgPool")
    with benchmark.timed(x, layer._sparse_unique_name or layer.name or what):
        indices, shape, kmap, store = _new_map(layer, x)
        if watch is not None:
            watch.built()
        y = core_pool.pool(features, kmap, mode, floor=0.0)
    entries = entries_of(x)
    if key is not None:
        entries[key] = record_of(x, layer, indices, shape, kmap, store)
    record_voxels(layer, y)
    if watch is not None:
        watch.finish(int(y.shape[0]))
    note("spconv", what)
    return output(x, y, indices, shape, entries)


def _new_map(layer: Any, x: Any) -> tuple[torch.Tensor, list[int], KernelMap, MapStore]:
    """(output indices, output shape, map, store) by the rule of regular or submanifold layers."""
    box, kernel, dilation = box_of(x), tuple(layer.kernel_size), tuple(layer.dilation)
    grid = shape_of(x)
    if layer.subm:
        offsets = geometry.submanifold_offsets(kernel, dilation)
        indices, kmap, store = maps.submanifold_map(x.indices, box, offsets)
        return indices, grid, kmap, store
    shape = geometry.conv_output_size(grid, kernel, layer.stride, layer.padding, dilation)
    geometry.check_output_size(shape, type(layer).__name__, grid)
    offsets = geometry.strided_offsets(kernel, dilation, tuple(layer.padding))
    out_box = Box.grid(box.size[0], shape)
    indices, kmap, store = maps.strided_map(x.indices, box, offsets, tuple(layer.stride), out_box)
    return indices, shape, kmap, store


def global_pool_forward(layer: Any, x: Any) -> torch.Tensor:
    """[batch_size, C]: maximum or mean of each batch item's rows; other rows take no part."""
    what = type(layer).__name__
    features = check_input(x, what)
    mode = "avg" if layer.is_mean else "max"
    y = core_pool.global_pool(features, x.indices[:, 0], int(x.batch_size), mode)
    note("spconv", what)
    return y
