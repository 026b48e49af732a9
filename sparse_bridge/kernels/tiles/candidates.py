"""Tiles worth timing, for the tuner and the compile check.

A candidate is a shape of its generation's record (`runtime.architectures`), clipped to the
problem's channels and to the target's shared memory. The default tile of
`tile_config` always comes first, so tuning can only improve on it.
"""

from __future__ import annotations

import dataclasses

import torch

from ..runtime.generation import Shape
from ..runtime.target import Target
from .clamps import clamp_for_registers, clamp_for_smem
from .tile import GemmSize, TileConfig, power
from .tile_config import gather_tile, wgrad_tile

DIRECTIONS = ("fwd", "dgrad", "wgrad")

_SHARED_RESULTS = 32  # of a thread, at most, under waves_per_eu > 1


def candidates(
    target: Target, dtype: torch.dtype, size: GemmSize, precision: str, direction: str, order: str = "oi"
) -> list[TileConfig]:
    """Distinct tiles worth timing for one problem, the default first.

    size: of the product itself: for "dgrad" c_in counts the columns of dy. Its rows are for the
    default; wgrad reads its channels alone.
    precision: "ieee", "tf32" or "tf32x3", for fp32.  direction: one of `DIRECTIONS`, ValueError for
    any other.  order: see `gather_tile`.
    """
    c_in, c_out = size.c_in, size.c_out
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r}; expected one of {DIRECTIONS}.")
    lists, half = target.generation.candidates, dtype in (torch.float16, torch.bfloat16)
    if direction == "wgrad":
        default = wgrad_tile(target, dtype, c_in, c_out, precision)
        tiles = _shapes(lists.wgrad_half if half else lists.wgrad_single, c_in, c_out, None)
    else:
        default = gather_tile(target, dtype, size, precision, order)
        tiles = _shapes(lists.gather_half if half else lists.gather_single, None, c_out, c_in)
    largest = max(tiles, key=lambda t: (t.block_m * t.block_n * t.block_k, t.num_warps))
    if largest.block_m * largest.block_n >= 64 * 64:
        for options in lists.options_half if half else lists.options_single:
            tiles.append(dataclasses.replace(largest, vendor=options))
    # What has to shrink for the shared memory is in the list already, or not worth timing.
    tiles = [tile for tile in tiles if clamp_for_smem(tile, target, dtype.itemsize) == tile]
    wgrad = direction == "wgrad"
    tiles = [clamp_for_registers(tile, target, dtype, precision, wgrad) for tile in tiles]
    tiles = [tile for tile in tiles if not _crowded(tile, target)]
    if not wgrad:
        tiles = [tile for tile in tiles if same_sums(target, tile, default, precision)]
    return list(dict.fromkeys([default, *tiles]))


def same_sums(target: Target, tile: TileConfig, default: TileConfig, precision: str) -> bool:
    """Whether a tile adds a row's products in the default's order: see `depth_of` and
    `Generation.least_rows`. The tuner compares the bits all the same."""
    generation = target.generation
    return (
        tile.block_m >= generation.least_rows
        and tile.block_n >= min(default.block_n, generation.least_columns)
        and (precision != "tf32x3" or tile.block_k == default.block_k)
    )


def _crowded(tile: TileConfig, target: Target) -> bool:
    """Whether waves that share their registers with others hold too many results for it."""
    results = tile.block_m * tile.block_n // (tile.num_warps * target.warp_size)
    return results > _SHARED_RESULTS and dict(tile.vendor).get("waves_per_eu", 1) > 1


def _shapes(shapes: tuple[Shape, ...], rows: int | None, columns: int, depth: int | None) -> list[TileConfig]:
    """The shapes, no wider than their channels (None: that side counts rows or pairs). One that
    would lose more than half a side is left out: a smaller one does its work better."""
    tiles = []
    for rank, (m, n, k, warps, stages) in enumerate(shapes):
        sides = ((m, rows), (n, columns), (k, depth))
        clipped = [side if size is None else power(size, 16, side) for side, size in sides]
        if rank < 2 or all(2 * c >= s for c, s in zip(clipped, (m, n, k), strict=True)):
            tiles.append(TileConfig(clipped[0], clipped[1], clipped[2], warps, stages))
    return tiles
