"""Tiles of products whose inputs are so narrow that one step of the reduction takes several
offsets."""

from __future__ import annotations

import dataclasses

import torch

from ..runtime.target import Target
from .clamps import clamp_for_registers, clamp_for_smem
from .tile import TileConfig, power

WIDEST = 8  # channels; from 16 on a step is filled by one offset
FEW_OFFSETS, OFFSETS = 8, 16  # of a step
SMALL = 27  # offsets up to which steps of few leave more of them out

_PRODUCT_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def width_of(c_in: int) -> int:
    """Channels that a step keeps for each of its offsets."""
    return power(c_in, 1, WIDEST)


def narrow_tile(
    target: Target, dtype: torch.dtype, precision: str, c_in: int, c_out: int, n_offsets: int
) -> TileConfig:
    """The tile of a narrow product. There are no others: a tile is through in few steps, and what
    they wait for is the same in all tiles.

    precision: of fp32.
    """
    product = _PRODUCT_NAMES.get(dtype, "fp32" if precision == "ieee" else precision)
    deepest = 256 // dtype.itemsize if target.generation.matrix_kinds(product) else 16
    width = width_of(c_in)
    # Channels that are loaded one by one take registers: 16 offsets of 5 channels 160, 8 take 88.
    few = n_offsets <= SMALL or (width == WIDEST and c_in < WIDEST)
    depth = min(deepest, width * (FEW_OFFSETS if few else OFFSETS))
    tile = TileConfig(64, power(c_out, 16, 64), max(16, depth), 4, 1)
    tile = clamp_for_smem(tile, target, dtype.itemsize)
    return clamp_for_registers(tile, target, dtype, precision, wgrad=False)


def clamp_for_wide(tile: TileConfig, wide: bool) -> TileConfig:
    """The tile under 64-bit offsets, if they are: 64 columns before a norm spill 80 bytes then
    (Triton 3.9, sm_100)."""
    return dataclasses.replace(tile, block_n=min(tile.block_n, 32)) if wide else tile
