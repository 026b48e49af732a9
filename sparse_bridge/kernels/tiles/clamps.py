"""Tiles made smaller: what shared memory, registers and single problems leave of them."""

from __future__ import annotations

import dataclasses

import torch

from ..runtime.target import Target
from .epilogue_bits import NORM, RESIDUAL
from .tile import DEEPEST, ROWS_OF_TWO, TileConfig


def _smem_bytes(tile: TileConfig, target: Target, element_size: int) -> int:
    """Bytes of shared memory to reckon with. Where loads go straight into it, Triton 3.7 and newer
    keep two buffers there from two stages on, with up to a sixteenth of padding."""
    n_bytes = tile.shared_bytes(element_size)
    if not target.generation.direct_to_shared:
        return n_bytes
    buffers = dataclasses.replace(tile, num_stages=3).shared_bytes(element_size)
    return max(n_bytes, buffers) * 17 // 16


def clamp_for_smem(tile: TileConfig, target: Target, element_size: int) -> TileConfig:
    """Give up stages, then depth, until the operands fit the target's shared memory. Stages that
    keep rows under way need a Triton that knows how."""
    if tile.num_stages >= ROWS_OF_TWO and not target.queues_rows:
        tile = dataclasses.replace(tile, num_stages=DEEPEST)
    while _smem_bytes(tile, target, element_size) > target.shared_memory:
        if tile.num_stages > 2:
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 16:
            tile = dataclasses.replace(tile, block_k=tile.block_k // 2)
        else:
            tile = dataclasses.replace(tile, block_n=tile.block_n // 2)
    return tile


_NORMED_RESULTS = 16  # of a thread; each has a column of its own, of up to five fp64 vectors
_RAGGED_RESULTS = 64  # of a thread, of IEEE fp32: 48 bytes are spilled (Triton 3.6 to 3.9, sm_90)
_WARPS = 8


def clamp_for_registers(
    tile: TileConfig, target: Target, dtype: torch.dtype, precision: str, wgrad: bool
) -> TileConfig:
    """The tile, made shallower, then spread over more warps, then smaller, until its generation
    keeps it in registers. wgrad: block_m counts channels, so it may shrink below the packed
    tiles."""
    limits = target.generation.limits
    half = dtype != torch.float32
    if half and (target.has_matrix_units or limits.gather is not None):
        limit = limits.wgrad if wgrad else limits.gather
    elif half or precision == "ieee":
        limit = limits.plain
    else:
        limit = limits.split if precision == "tf32x3" else limits.tf32
    if limit is None:
        return tile
    m, n, warps = min(tile.block_m, limit.side), min(tile.block_n, limit.side), tile.num_warps
    while m * n > limit.results * warps * target.warp_size:
        if warps < _WARPS:
            warps *= 2
        elif m > (32 if wgrad else 64):
            m //= 2
        else:
            n //= 2
    # Without matrix instructions, wgrad over 32 steps spills 100 bytes or more (Triton 3.9, sm_80).
    deepest = max(16, limit.depth // 2) if wgrad and limit is limits.plain else limit.depth
    depth, stages = min(tile.block_k, deepest), min(tile.num_stages, limit.stages)
    return dataclasses.replace(tile, block_m=m, block_n=n, block_k=depth, num_warps=warps, num_stages=stages)


def clamp_for_problem(
    tile: TileConfig, target: Target, dtype: torch.dtype, precision: str, c_in: int, wide: bool, epilogue: int
) -> TileConfig:
    """The gather-GEMM's tile, made smaller where one problem takes more registers than others.

    Under 64-bit offsets (wide) a thread holds fewer results, fewer still before a residual and,
    for IEEE fp32 or on some generations, before a norm (epilogue: see `EpilogueForm`). Where
    rows are ragged (c_in no multiple of block_k), so that every element has an address of its own,
    it holds fewer channels then, and fewer results in the largest tiles. Where a norm follows,
    some hold fewer channels and results for IEEE fp32, and a thread that takes rows out of tensor
    memory holds few columns.
    """
    single, n, warps = dtype == torch.float32, tile.block_n, tile.num_warps
    generation, least = target.generation, target.generation.least_columns
    normed, plain = bool(epilogue & NORM), single and precision == "ieee"
    summed = bool(epilogue & RESIDUAL) and wide
    ragged = c_in % tile.block_k != 0
    fewer = summed or (normed and (generation.norm_halves or (wide and (plain or ragged))))
    # Behind a norm of fp64 a residual's addresses cost another half (36 bytes; Triton 3.9, sm_90).
    per_thread = (32 if single else 64) // (1 if not fewer else 4 if summed and normed else 2)
    narrow = normed and plain and generation.norm_narrows_fp32
    most = per_thread * tile.num_warps * target.warp_size
    while (wide or narrow) and tile.block_m * n > most and n > least:
        n //= 2
    if ragged and tile.block_m * n >= 128 * 256:
        n //= 2
    if ragged and not single and tile.block_m * n >= 128 * warps * target.warp_size:
        warps = min(2 * warps, _WARPS)  # 128 results spill 100 bytes (Triton 3.9, sm_90)
    if ragged and plain and tile.block_m * n >= _RAGGED_RESULTS * warps * target.warp_size:
        warps = min(2 * warps, _WARPS)
    if normed and generation.tensor_memory and not plain:
        most = _NORMED_RESULTS * target.warp_size
        while tile.block_m * n > most * warps and n > least:
            n, warps = (n, 2 * warps) if warps < _WARPS else (n // 2, warps)
    depth, stages = tile.block_k, tile.num_stages
    if normed and precision in ("tf32", "tf32x3") and tile.block_m >= 128 and stages > DEEPEST:
        # 48 and 8 bytes with weights that are turned around on the way (Triton 3.9, sm_90).
        warps, stages = (_WARPS, stages) if n >= 128 else (warps, 3)
    if wide and stages > DEEPEST:  # with two loads of rows under way 80 bytes or more are spilled
        depth, stages = min(depth, 64), 3
    elif ragged and not single and (tile.block_m * n >= 128 * 128 or tile.block_m >= 128):
        depth = min(depth, 64)  # 352 bytes (Triton 3.9, sm_90)
    elif summed and normed and not single:
        depth = min(depth, 64)
    if wide and precision == "tf32x3" and depth > 32 and n > least:
        n //= 2  # 64 channels spill 8 bytes behind a bias (Triton 3.9, sm_90); depth is the layer's
    if narrow or (ragged and wide):
        depth = min(depth, 16 if normed and plain and ragged and wide else 32)
    if (n, depth, warps, stages) == (tile.block_n, tile.block_k, tile.num_warps, tile.num_stages):
        return tile
    return dataclasses.replace(tile, block_n=n, block_k=depth, num_warps=warps, num_stages=stages)


def clamp_for_splits(tile: TileConfig) -> TileConfig:
    """The gather-GEMM's tile under mask splits, which leave sums in fp32: the largest tiles spill
    16 bytes then (Triton 3.9, sm_80)."""
    n = tile.block_n // 2 if tile.block_m * tile.block_n >= 128 * 256 else tile.block_n
    return dataclasses.replace(tile, block_n=n)


def clamp_for_grouped(
    tile: TileConfig, target: Target, dtype: torch.dtype, precision: str, c_in: int, wide: bool
) -> TileConfig:
    """`clamp_for_problem` for the grouped gather-GEMM, where addresses of rows take registers, too:
    with 128 rows and 32 channels of IEEE fp32 a thread spills 20 bytes (Triton 3.9, sm_80)."""
    if tile.num_stages > DEEPEST:  # its rows are known before the reduction begins
        tile = dataclasses.replace(tile, num_stages=3)
    tile = clamp_for_problem(tile, target, dtype, precision, c_in, wide, 0)
    if dtype == torch.float32 and precision == "ieee" and tile.block_m >= 128:
        tile = dataclasses.replace(tile, block_k=min(tile.block_k, 16))
    return tile
