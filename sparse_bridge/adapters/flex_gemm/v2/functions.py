"""The functions of `flex_gemm.ops`, and their forms for two, three and four axes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .... import log
from .cache import NeighborCache, NeighborCacheT, build_neighbor_cache
from .convolutions import sparse_conv, sparse_conv_transpose, submanifold_conv
from .points import coalesce_coords, sort_coords, sparse_grid_sample, sparse_to_dense
from .pools import sparse_pool, submanifold_pool
from .resize import sparse_pixel_shuffle, sparse_pixel_unshuffle, sparse_upsample
from .windows import (
    compute_strided_kernel_delta_output_shape,
    compute_strided_kernel_delta_transpose_output_shape,
    compute_strided_kernel_size_output_shape,
    compute_strided_kernel_size_transpose_output_shape,
)

LAYERS: tuple[Callable[..., Any], ...] = (
    submanifold_conv,
    sparse_conv,
    sparse_conv_transpose,
    submanifold_pool,
    sparse_pool,
    sparse_upsample,
    sparse_pixel_shuffle,
    sparse_pixel_unshuffle,
)
_OTHERS: tuple[Any, ...] = (
    sparse_grid_sample,
    sparse_to_dense,
    sort_coords,
    coalesce_coords,
    NeighborCache,
    NeighborCacheT,
    build_neighbor_cache,
    compute_strided_kernel_size_output_shape,
    compute_strided_kernel_delta_output_shape,
    compute_strided_kernel_size_transpose_output_shape,
    compute_strided_kernel_delta_transpose_output_shape,
)


def _numbered(function: Callable[..., Any], dimension: int) -> Callable[..., Any]:
    """The form for `dimension` axes, which also takes one integer for all of them."""

    @functools.wraps(function)
    def of_dimension(*args: Any, **kwargs: Any) -> Any:
        return function(*args, dimension=dimension, **kwargs)

    of_dimension.__name__ = of_dimension.__qualname__ = f"{function.__name__}{dimension}d"
    return of_dimension


NAMES: dict[str, Any] = {function.__name__: function for function in (*LAYERS, *_OTHERS)}
NAMES.update({f"{layer.__name__}{n}d": _numbered(layer, n) for layer in LAYERS for n in (2, 3, 4)})


def deprecated(name: str, instead: str) -> None:
    """The warning of a name that 2.0 keeps for old code."""
    log.warn(f"flex_gemm.ops.spconv.{name} is deprecated; {instead}.", DeprecationWarning)


def sparse_submanifold_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: Any = None,
    dilation: Any = 1,
) -> tuple[torch.Tensor, NeighborCache]:
    """`submanifold_conv3d` in the argument order of 1.x; the shape has its channels last."""
    deprecated("sparse_submanifold_conv3d", "use flex_gemm.ops.submanifold_conv3d")
    return submanifold_conv(
        feats, coords, shape, weight, bias, dilation=dilation, neighbor_cache=neighbor_cache, dimension=3
    )
