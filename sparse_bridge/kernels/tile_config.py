"""Tiles: the knobs of one GEMM launch, and the default choice that needs no tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .target import Target

__all__ = ["TileConfig", "fit", "gather_tile", "power", "split_for", "wgrad_tile"]


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """block_m x block_n results per program, reduced block_k at a time.

    For the gather-GEMM block_m counts rows; for wgrad it counts input channels and block_k pairs.
    split_k: how many programs share one reduction.  vendor: extra compile options, HIP only.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    vendor: tuple[tuple[str, int], ...] = ()

    def options(self, target: Target) -> dict[str, Any]:
        """Compile options for `target`."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if target.backend == "hip":
            options.update(self.vendor)
        return options

    def shared_bytes(self, element_size: int) -> int:
        """Upper estimate of the shared memory the operands of one program need."""
        return (
            (self.block_m + self.block_n)
            * self.block_k
            * element_size
            * max(1, self.num_stages - 1)
        )


def power(value: int, low: int, high: int) -> int:
    """Smallest power of two that holds `value`, between low and high."""
    return min(high, max(low, 1 << (max(1, value) - 1).bit_length()))


def fit(tile: TileConfig, target: Target, element_size: int) -> TileConfig:
    """Give up stages, then depth, until the operands fit the target's shared memory."""
    while tile.shared_bytes(element_size) > target.shared_memory:
        if tile.num_stages > 2:
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 16:
            tile = dataclasses.replace(tile, block_k=tile.block_k // 2)
        else:
            tile = dataclasses.replace(tile, block_n=tile.block_n // 2)
    return tile


def gather_tile(
    target: Target, dtype: torch.dtype, n_rows: int, c_in: int, c_out: int, n_offsets: int,
    precision: str = "ieee",
) -> TileConfig:  # fmt: skip
    """Default tile of the gather-GEMM; c_in and c_out are channels per group, precision is that of
    fp32."""
    half = dtype in (torch.float16, torch.bfloat16)
    roomy = half and target.shared_memory >= 128 << 10
    many = n_rows >= 256 * target.compute_units
    if roomy and many and c_in % 128 == 0 and c_out % 256 == 0:
        return TileConfig(128, 256, 128, 8, 2)
    if precision == "ieee" and not half and many and c_in >= 256 and c_out >= 256:
        return TileConfig(128, 128, 16, 4, 2)
    block_n = power(c_out, 16, 128)
    block_k = power(c_in, 16, 128 if roomy else 64)
    while block_k > 16 and c_in % block_k and c_in % (block_k // 2) == 0:
        block_k //= 2  # 96 channels: three even blocks of 32 beat two ragged ones of 64
    # Without matrix units a thread wants more results to share its operands.
    block_m = 128 if precision == "ieee" and not half and many and 32 <= block_n <= 64 else 64
    stages = 3 if block_k * block_n <= 32 * 32 else 2
    tile = TileConfig(block_m, block_n, block_k, 4, stages)
    split = split_for(target, tile, n_rows, c_in, c_out, n_offsets)
    return fit(dataclasses.replace(tile, split_k=split), target, dtype.itemsize)


def split_for(
    target: Target, tile: TileConfig, n_rows: int, c_in: int, c_out: int, n_offsets: int
) -> int:
    """How many programs share one reduction so that a short problem fills the device."""
    split = 1
    programs = -(-n_rows // tile.block_m) * -(-c_out // tile.block_n)
    depth = n_offsets * -(-c_in // tile.block_k)
    while programs * split * 2 <= 2 * target.compute_units and depth >= 16 * split and split < 16:
        split *= 2
    return split


def wgrad_tile(
    target: Target, dtype: torch.dtype, c_in: int, c_out: int, precision: str = "ieee"
) -> TileConfig:
    """Default tile of wgrad; split_k is left to the launcher, which knows the number of blocks."""
    if dtype in (torch.float16, torch.bfloat16):
        limit = 128 if max(c_in, c_out) > 128 else 64
        tile = TileConfig(power(c_in, 16, limit), power(c_out, 16, limit), 64, 4, 3)
    elif precision == "tf32":
        tile = TileConfig(power(c_in, 16, 32), power(c_out, 16, 128), 64, 4, 2)
    else:
        deep = 16 if max(c_in, c_out) > 64 else 32
        tile = TileConfig(power(c_in, 16, 64), power(c_out, 16, 64), deep, 4, 3)
    return fit(tile, target, dtype.itemsize)
