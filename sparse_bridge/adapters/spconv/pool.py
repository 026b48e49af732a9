"""Local and global pooling layers of spconv, on the core."""

from __future__ import annotations

from typing import Any

import torch

from ...core.late_maps import map_for_layer
from ...core.ops import pool as core_pool
from ..call_stats import note
from . import benchmark
from .conv import record_voxels
from .geometry import check_dimension
from .keys import KeyTakenError, entries_of
from .maps import layer_map_of
from .records import record_of
from .tensors import check_input, items_of


def max_pool_forward(layer: Any, x: Any) -> Any:
    """Local max pooling, at least 0 as in spconv; the gradient goes to every input that ties."""
    return _pool(layer, x, "max")


def avg_pool_forward(layer: Any, x: Any) -> Any:
    """Mean over the active inputs of each window."""
    return _pool(layer, x, "avg")


def _pool(layer: Any, x: Any, mode: str) -> Any:
    layer_name, key = type(layer).__name__, layer.indice_key
    if key is not None and map_for_layer(x.indice_dict, key) is not None:
        check_input(x, layer_name)
        raise KeyTakenError(f"{layer_name}: indice_key {key!r} exists already; pools never reuse a key.")
    if torch.compiler.is_compiling():
        return _traced(layer, x, mode)
    features = check_input(x, layer_name)
    check_dimension(layer, x)
    watch = None
    if x.benchmark:
        watch = benchmark.of_pool(x, layer, "SparseMaxPool" if mode == "max" else "SparseAvgPool")
    with benchmark.timed(x, layer._sparse_unique_name or layer.name or layer_name):
        built = layer_map_of(layer, x)
        if watch is not None:
            watch.built()
        y = core_pool.pool(features, built.kmap, mode, floor=0.0)
    entries = entries_of(x)
    if key is not None:
        entries[key] = record_of(x, layer, built)
    record_voxels(layer, y)
    if watch is not None:
        watch.finish(int(y.shape[0]))
    note("spconv", layer_name)
    out = x.replace_feature(y)
    out.indices, out.spatial_shape, out.indice_dict = built.indices, built.shape, entries
    return out


def _traced(layer: Any, x: Any, mode: str) -> Any:
    """`_pool` in a graph; where that cannot be, between two graphs."""
    from . import compiled

    if not compiled.served(x, layer):
        return compiled.outside(_pool, layer, x, mode)
    output = compiled.pooled(layer, x, mode)
    record_voxels(layer, output.features)
    return output.tensor(x, output.features)


def global_pool_forward(layer: Any, x: Any) -> torch.Tensor:
    """[batch_size, C]: maximum or mean of each batch item's rows; other rows take no part."""
    layer_name = type(layer).__name__
    features = check_input(x, layer_name)
    mode = "avg" if layer.is_mean else "max"
    if torch.compiler.is_compiling():
        from . import compiled

        return compiled.global_pool(features, x, mode)
    y = core_pool.global_pool(features, x.indices[:, 0], items_of(x), mode)
    note("spconv", layer_name)
    return y
