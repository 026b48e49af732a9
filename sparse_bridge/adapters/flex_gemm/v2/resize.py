"""Between grids of different fineness: upsampling, and channels to space and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....core.maps.kernel_map import dense_table
from ....core.ops.voxel import devoxelize
from ....core.traced import between_graphs
from ...call_stats import note
from ..arguments import Ints
from ..arguments import kernel_size as kernel_sizes
from ..errors import ArgumentShapeError, ArgumentValueError
from ..lattice import Lattice
from . import cache as caches
from .cache import NeighborCache, Outputs
from .convolutions import LayerOutput
from .points import PADDINGS, linear_rows
from .pools import gathered
from .windows import box_window

__all__ = ["sparse_pixel_shuffle", "sparse_pixel_unshuffle", "sparse_upsample"]


@between_graphs
def sparse_upsample(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    scale_factor: Any,
    mode: str = "nearest",
    padding_mode: str = "normalize",
    *,
    output_coords: torch.Tensor | None = None,
    output_shape: Sequence[int] | None = None,
    neighbor_cache: Any = None,
    dimension: int | None = None,
) -> LayerOutput:
    """Values on a grid that is finer by `scale_factor` per axis.

    mode: "nearest" copies the parent; "linear" interpolates between cell centres, as
        `torch.nn.functional.interpolate(align_corners=False)`.
    padding_mode: what missing voxels do to "linear": "normalize" divides by the weights of those
        that exist, "zeros" takes them as zero.
    output_coords: None: all children of all rows, ascending.  neighbor_cache: of an earlier call,
        or of the pool on the way down.
    Others, results and errors as in `sparse_conv`.
    """
    caller = "sparse_upsample"
    if mode not in ("nearest", "linear") or padding_mode not in PADDINGS:
        raise ArgumentValueError(
            f"mode is {mode!r}, padding_mode {padding_mode!r}; expected 'nearest' or 'linear', and one of {PADDINGS}."
        )
    cache, factor = _finer(
        caller, coords, shape, scale_factor, dimension, Outputs(output_coords, output_shape, neighbor_cache)
    )
    kmap = cache.kernel_map(feats, math.prod(factor))
    if mode == "nearest":
        y = gathered(feats, dense_table(kmap, 0).amax(0))
    else:
        rows, weights = _between_centres(cache.source, cache.target, factor, padding_mode)
        y = devoxelize(feats, rows, weights)
    note("flex_gemm", caller)
    return y, cache.output_coords, cache.shape(y.shape[1]), cache


@between_graphs
def sparse_pixel_shuffle(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    upscale_factor: Any,
    *,
    output_coords: torch.Tensor | None = None,
    output_shape: Sequence[int] | None = None,
    neighbor_cache: Any = None,
    dimension: int | None = None,
) -> LayerOutput:
    """Channels [N, V * C] to the V = prod(factor) children of each row, [M, C].

    The child with row-major index v of its block gets `feats.view(N, V, C)[:, v]`. Others, results
    and errors as in `sparse_upsample`.
    """
    caller = "sparse_pixel_shuffle"
    cache, factor = _finer(
        caller, coords, shape, upscale_factor, dimension, Outputs(output_coords, output_shape, neighbor_cache)
    )
    volume = math.prod(factor)
    kmap = cache.kernel_map(feats, volume)
    if feats.shape[1] % volume:
        raise ArgumentShapeError(f"{caller} got {feats.shape[1]} channels; expected a multiple of {volume}.")
    parents = dense_table(kmap, 0).long()
    slots = torch.arange(volume, device=parents.device).unsqueeze(1)
    index = torch.where(parents >= 0, parents * volume + slots, -1).amax(0)
    channels = feats.shape[1] // volume
    y = gathered(feats.reshape(feats.shape[0] * volume, channels), index)
    note("flex_gemm", caller)
    return y, cache.output_coords, cache.shape(channels), cache


@between_graphs
def sparse_pixel_unshuffle(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    downscale_factor: Any,
    *,
    output_coords: torch.Tensor | None = None,
    output_shape: Sequence[int] | None = None,
    neighbor_cache: Any = None,
    dimension: int | None = None,
) -> LayerOutput:
    """Rows [N, C] to the channels of their block, [M, V * C]; zeros where a block has no row.

    Extents that the factor does not divide are rounded up. Others, results and errors as in
    `sparse_conv`.
    """
    caller = "sparse_pixel_unshuffle"
    factor = kernel_sizes(downscale_factor, dimension, "downscale_factor")
    out = Outputs(output_coords, output_shape, neighbor_cache, covering=True)
    cache = caches.down(caller, coords, shape, box_window(factor, factor), out)
    volume = math.prod(factor)
    index = dense_table(cache.kernel_map(feats, volume), 0).t()
    y = gathered(feats, index).view(index.shape[0], volume * feats.shape[1])
    note("flex_gemm", caller)
    return y, cache.output_coords, cache.shape(y.shape[1]), cache


def _finer(
    caller: str, coords: torch.Tensor, shape: Sequence[int] | None, factor: Any, dimension: int | None, out: Outputs
) -> tuple[NeighborCache, Ints]:
    """(the cache from rows to children, the factor per axis)."""
    factors = kernel_sizes(factor, dimension, "the factor")
    return caches.up(caller, coords, shape, box_window(factors, factors), out), factors


def _between_centres(
    coarse: Lattice, fine: Lattice, factor: Ints, padding_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `coarse` and weights for the cell centres of `fine`."""
    cut = fine.rows.shape[1] - fine.dimension
    scale = torch.tensor(factor, dtype=torch.float64, device=fine.rows.device)
    points = (fine.rows[:, cut:].double() + 0.5) / scale - 0.5
    return linear_rows(coarse, fine.rows[:, :cut], points, padding_mode)
