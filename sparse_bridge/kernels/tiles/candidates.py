"""Tiles worth timing, per GPU family: data for the tuner, compiled ahead by the compile gate.

A candidate is a shape (block_m, block_n, block_k, num_warps, num_stages) from its family's row,
clipped to the problem's channels and to the target's shared memory. The default tile of
`tile_config` always comes first, so tuning can only improve on it.
"""

from __future__ import annotations

import dataclasses

import torch

from ..runtime.target import Target
from .tile_config import TileConfig, fit, gather_tile, in_registers, power, split_for, wgrad_tile

__all__ = ["DIRECTIONS", "candidates"]

DIRECTIONS = ("fwd", "dgrad", "wgrad")

Shape = tuple[int, int, int, int, int]
Vendor = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """Candidate shapes of one GPU family.

    gather: rows x output channels x input channels, warps, stages.  wgrad: input channels x output
    channels x pairs, warps, stages.  half: fp16 and bf16; single: fp32.  vendor: compile options
    that a HIP candidate tries beside the plain one, on its largest tiles.
    """

    gather_half: tuple[Shape, ...]
    gather_single: tuple[Shape, ...]
    wgrad_half: tuple[Shape, ...]
    wgrad_single: tuple[Shape, ...]
    vendor_half: tuple[Vendor, ...] = ()
    vendor_single: tuple[Vendor, ...] = ()


# Fits every GPU: small tiles, two stages.
_SAFE = Family(
    gather_half=((64, 64, 32, 4, 2), (128, 64, 32, 4, 2), (64, 128, 32, 4, 2)),
    gather_single=((64, 64, 16, 4, 2), (128, 32, 16, 4, 2), (64, 32, 32, 4, 2)),
    wgrad_half=((64, 64, 32, 4, 2), (32, 64, 64, 4, 2)),
    wgrad_single=((64, 64, 16, 4, 2), (32, 32, 32, 4, 2)),
)
_AMPERE = Family(
    gather_half=(
        (64, 64, 32, 4, 3), (64, 64, 64, 4, 3), (128, 64, 32, 4, 3), (128, 64, 64, 4, 2),
        (64, 128, 32, 4, 3), (128, 128, 32, 8, 3), (128, 128, 64, 8, 2),
    ),
    gather_single=(
        (64, 64, 16, 4, 3), (64, 64, 32, 4, 2), (128, 64, 16, 4, 3), (128, 128, 16, 8, 2),
    ),
    wgrad_half=(
        (64, 64, 32, 4, 3), (64, 64, 64, 4, 2), (128, 64, 32, 4, 3), (128, 128, 32, 8, 2),
    ),
    wgrad_single=((64, 64, 16, 4, 2), (32, 64, 32, 4, 2), (64, 64, 32, 4, 2)),
)  # fmt: skip
_HOPPER = Family(
    gather_half=(
        (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (64, 128, 128, 4, 2),
        (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 128, 8, 2), (128, 256, 64, 8, 3),
        (128, 128, 64, 4, 4),
    ),
    gather_single=(
        (64, 64, 16, 4, 3), (64, 64, 32, 4, 3), (64, 128, 32, 4, 2), (128, 64, 32, 4, 2),
        (128, 128, 16, 8, 2), (64, 64, 64, 4, 2), (64, 128, 64, 4, 3),
    ),
    wgrad_half=(
        (64, 64, 64, 4, 3), (64, 64, 32, 4, 4), (64, 64, 128, 4, 2), (64, 128, 64, 4, 3),
        (128, 128, 64, 8, 2), (128, 64, 64, 4, 2),
    ),
    wgrad_single=((64, 64, 16, 4, 3), (32, 64, 64, 4, 2), (64, 64, 32, 4, 2), (32, 128, 32, 4, 2)),
)  # fmt: skip
_CDNA = Family(
    gather_half=(
        (64, 64, 32, 4, 2), (64, 64, 64, 4, 2), (128, 64, 32, 4, 2), (128, 64, 64, 4, 2),
        (64, 128, 32, 4, 2), (128, 128, 32, 4, 2), (128, 128, 64, 8, 2),
    ),
    gather_single=(
        (64, 64, 16, 4, 2), (64, 64, 32, 4, 2), (128, 64, 16, 4, 2), (128, 64, 32, 4, 2),
        (128, 128, 16, 8, 2),
    ),
    wgrad_half=(
        (64, 64, 32, 4, 2), (64, 64, 64, 4, 2), (128, 64, 32, 4, 2), (128, 128, 32, 8, 2),
    ),
    wgrad_single=((64, 64, 16, 4, 2), (64, 64, 32, 4, 2), (32, 64, 32, 4, 2)),
    vendor_half=(
        (("matrix_instr_nonkdim", 16), ("kpack", 2)), (("waves_per_eu", 2),),
    ),
    vendor_single=((("matrix_instr_nonkdim", 16),), (("waves_per_eu", 2),)),
)  # fmt: skip
_CDNA4 = dataclasses.replace(
    _CDNA,
    gather_half=(*_CDNA.gather_half, (128, 128, 128, 8, 2)),
    # Its matrix instructions are twice as deep, and it packs operands by itself.
    vendor_half=((("matrix_instr_nonkdim", 16),), (("waves_per_eu", 2),)),
)
_RDNA = Family(
    gather_half=(
        (64, 64, 32, 4, 2), (64, 64, 64, 4, 2), (128, 64, 32, 8, 2), (64, 128, 32, 8, 2),
        (128, 128, 32, 8, 2),
    ),
    gather_single=((64, 64, 16, 4, 2), (64, 64, 32, 8, 2), (128, 64, 16, 8, 2)),
    wgrad_half=((64, 64, 32, 4, 2), (64, 64, 64, 8, 2), (128, 64, 32, 8, 2)),
    wgrad_single=((64, 64, 16, 4, 2), (64, 64, 16, 8, 2), (32, 64, 32, 4, 2)),
    vendor_half=((("waves_per_eu", 2),),),
    vendor_single=((("waves_per_eu", 2),),),
)  # fmt: skip

FAMILIES = {
    "turing": _SAFE,
    "ampere": _AMPERE,
    "ada": _AMPERE,
    "hopper": _HOPPER,
    "blackwell": _HOPPER,
    "cdna2": _CDNA,
    "cdna3": _CDNA,
    "cdna4": _CDNA4,
    "rdna3": _RDNA,
    "rdna4": _RDNA,
    "generic": _SAFE,
}

_SHARED_RESULTS = 32  # of a thread, at most, under waves_per_eu > 1


def candidates(
    target: Target, dtype: torch.dtype, c_in: int, c_out: int, n_offsets: int, precision: str,
    direction: str, n_rows: int = 1 << 17, order: str = "oi",
) -> list[TileConfig]:  # fmt: skip
    """Distinct tiles worth timing for one problem, the default first.

    c_in, c_out: channels per group of the product itself: for "dgrad" c_in counts the columns of
    dy.  n_rows: result rows, which decide how many programs share a reduction; wgrad ignores it.
    precision: "ieee", "tf32" or "tf32x3", for fp32.  direction: one of `DIRECTIONS`.
    order: see `gather_tile`.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r}; expected one of {DIRECTIONS}.")
    family, half = FAMILIES[target.family], dtype in (torch.float16, torch.bfloat16)
    if direction == "wgrad":
        default = wgrad_tile(target, dtype, c_in, c_out, precision)
        tiles = _shapes(family.wgrad_half if half else family.wgrad_single, c_in, c_out, None)
    else:
        problem = (n_rows, c_in, c_out, n_offsets)
        default = gather_tile(target, dtype, *problem, precision, order)
        tiles = _shapes(family.gather_half if half else family.gather_single, None, c_out, c_in)
    largest = max(tiles, key=lambda t: (t.block_m * t.block_n * t.block_k, t.num_warps))
    if largest.block_m * largest.block_n >= 64 * 64:
        for vendor in family.vendor_half if half else family.vendor_single:
            tiles.append(dataclasses.replace(largest, vendor=vendor))
    # What has to shrink for the shared memory is in the list already, or not worth timing.
    tiles = [tile for tile in tiles if fit(tile, target, dtype.itemsize) == tile]
    wgrad = direction == "wgrad"
    tiles = [in_registers(tile, target, dtype, precision, wgrad) for tile in tiles]
    tiles = [tile for tile in tiles if not _crowded(tile, target)]
    if not wgrad:
        tiles = [
            dataclasses.replace(tile, split_k=split_for(target, tile, *problem)) for tile in tiles
        ]
    return list(dict.fromkeys([default, *tiles]))


def _crowded(tile: TileConfig, target: Target) -> bool:
    """Whether waves that share their registers with others hold too many results for it."""
    results = tile.block_m * tile.block_n // (tile.num_warps * target.warp_size)
    return results > _SHARED_RESULTS and dict(tile.vendor).get("waves_per_eu", 1) > 1


def _shapes(
    shapes: tuple[Shape, ...], rows: int | None, columns: int, depth: int | None
) -> list[TileConfig]:
    """The shapes, no wider than their channels (None: that side counts rows or pairs). One that
    would lose more than half a side is left out: a smaller one does its work better."""
    tiles = []
    for place, (m, n, k, warps, stages) in enumerate(shapes):
        sides = ((m, rows), (n, columns), (k, depth))
        clipped = [side if size is None else power(size, 16, side) for side, size in sides]
        if place < 2 or all(2 * c >= s for c, s in zip(clipped, (m, n, k), strict=True)):
            tiles.append(TileConfig(clipped[0], clipped[1], clipped[2], warps, stages))
    return tiles
