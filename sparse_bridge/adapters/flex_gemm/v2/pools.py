"""Pools over the voxels that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.maps.kernel_map import KernelMap, dense_table
from ....core.ops.pool import pool
from ....core.ops.voxel import devoxelize
from ....core.traced import between_graphs
from ...call_stats import note
from ..arguments import kernel_size as kernel_sizes
from ..errors import ArgumentValueError
from . import cache as caches
from .cache import NeighborCache, Outputs
from .convolutions import LayerOutput
from .windows import box_window, centred_window

__all__ = ["gathered", "sparse_pool", "submanifold_pool"]

_REDUCES = {"sum": "sum", "mean": "avg", "max": "max", "min": "max", "prod": "prod"}


@between_graphs
def submanifold_pool(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    kernel_size: Any,
    reduce: str = "mean",
    *,
    neighbor_cache: Any = None,
    dimension: int | None = None,
) -> tuple[torch.Tensor, NeighborCache]:
    """Each row from the rows in the window around it, of `kernel_size` cells per axis.

    reduce: "sum", "mean", "max", "min" or "prod" over the rows that exist.  Others, results and
    errors as in `submanifold_conv`.
    """
    kernel = kernel_sizes(kernel_size, dimension)
    window = centred_window(kernel)
    cache = caches.around("submanifold_pool", coords, shape, window, neighbor_cache)
    y = _pooled(feats, cache, reduce, len(window.offsets))
    note("flex_gemm", "submanifold_pool")
    return y, cache


@between_graphs
def sparse_pool(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    reduce: str = "mean",
    *,
    output_coords: torch.Tensor | None = None,
    output_shape: Sequence[int] | None = None,
    neighbor_cache: Any = None,
    dimension: int | None = None,
) -> LayerOutput:
    """Each output from the inputs in its window.

    stride: None: the kernel size.  An output without inputs, among given ones, is 0 (1 for "prod").
    Others, results and errors as in `sparse_conv` and `submanifold_pool`.
    """
    kernel = kernel_sizes(kernel_size, dimension)
    window = box_window(kernel, kernel if stride is None else stride, padding)
    out = Outputs(output_coords, output_shape, neighbor_cache)
    cache = caches.down("sparse_pool", coords, shape, window, out)
    y = _pooled(feats, cache, reduce, len(window.offsets))
    note("flex_gemm", "sparse_pool")
    return y, cache.output_coords, cache.shape(y.shape[1]), cache


def gathered(feats: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of `feats` at index (any shape), zeros for -1: [index.numel(), C]; differentiable."""
    column = index.reshape(-1, 1).contiguous()
    ones = torch.ones(column.shape, dtype=torch.float32, device=column.device)
    return devoxelize(feats, column, ones)


def _pooled(feats: torch.Tensor, cache: NeighborCache, reduce: str, n_offsets: int) -> torch.Tensor:
    mode = _REDUCES.get(reduce)
    if mode is None:
        raise ArgumentValueError(f"reduce is {reduce!r}; expected one of {', '.join(_REDUCES)}.")
    kmap = cache.kernel_map(feats, n_offsets)
    if mode == "prod":
        return _product(feats, kmap)
    y = -pool(-feats, kmap, mode) if reduce == "min" else pool(feats, kmap, mode)
    if mode == "max" and cache.outputs_given:
        nothing = (dense_table(kmap, 0) < 0).all(0)
        y = y.masked_fill(nothing.unsqueeze(1), 0)
    return y


def _product(feats: torch.Tensor, kmap: KernelMap) -> torch.Tensor:
    index = dense_table(kmap, 0).t()
    work = feats if feats.dtype == torch.float64 else feats.float()
    values = gathered(work, index).view(*index.shape, feats.shape[1])
    return torch.where((index >= 0).unsqueeze(2), values, 1).prod(1).to(feats.dtype)
