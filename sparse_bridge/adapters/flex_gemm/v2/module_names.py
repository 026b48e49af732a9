"""Which names the modules below `flex_gemm.nn` and `flex_gemm.ops` of 2.0 hold."""

from __future__ import annotations

from typing import Any

from . import functions, modules

_OF_LAYERS = {
    "pool": ("SparsePool", "SubmanifoldPool"),
    "sparse_conv": ("SparseConv",),
    "submanifold_conv": ("SubmanifoldConv",),
    "upsample": ("SparseUpsample", "SparsePixel"),
}
_OF_FUNCTIONS = {
    "neighbor_cache": ("NeighborCache", "build_neighbor_cache"),
    "pool": ("sparse_pool", "submanifold_pool"),
    "pool.sparse_pool": ("sparse_pool",),
    "pool.submanifold_pool": ("submanifold_pool",),
    "sample": ("sparse_grid_sample", "sparse_pixel", "sparse_upsample"),
    "sample.grid_sample": ("sparse_grid_sample",),
    "sample.pixel_shuffle": ("sparse_pixel_shuffle",),
    "sample.pixel_unshuffle": ("sparse_pixel_unshuffle",),
    "sample.upsample": ("sparse_upsample",),
    "spconv.sparse_conv": ("sparse_conv",),
    "spconv.sparse_conv_transpose": ("sparse_conv_transpose",),
    "spconv.submanifold_conv": ("submanifold_conv",),
    "utils": ("compute_", "coalesce_", "sort_", "sparse_to_dense"),
}


def of(module: str) -> dict[str, Any]:
    """The names of `module`, "flex_gemm.ops.pool"."""
    _, part, name = module.split(".", 2)
    names, beginnings = {"nn": (modules.NAMES, _OF_LAYERS), "ops": (functions.NAMES, _OF_FUNCTIONS)}[part]
    return {key: value for key, value in names.items() if key.startswith(beginnings[name])}
