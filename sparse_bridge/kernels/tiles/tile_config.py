"""The default choice of a tile, which needs no tuning."""

from __future__ import annotations

import torch

from ..runtime.target import Target
from .clamps import clamp_for_registers, clamp_for_smem
from .queued_tile import CACHED_WEIGHT, MOST_ROWS, depth_of, queued_tile, spread, wide_pays
from .tile import GemmSize, TileConfig, power

__all__ = ["CACHED_WEIGHT", "depth_of", "gather_tile", "grouped_tile", "ways", "wgrad_shares", "wgrad_tile"]

GROUPED_WIDE = (128, 256, 64, 8, 3)


def ways(target: Target, dtype: torch.dtype, precision: str) -> tuple[bool, bool]:
    """Whether a gather-GEMM's rows queue up, and whether its operands have room for wide tiles.

    A tile depends on `order` only with room, on `GemmSize.expanding` only with a queue, and on its
    `n_offsets` only with either.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    queued = target.queues_rows and (half or precision != "ieee")
    return queued, half and target.shared_memory >= 128 << 10


def gather_tile(
    target: Target,
    dtype: torch.dtype,
    size: GemmSize,
    precision: str = "ieee",
    order: str = "oi",
    grouped: bool = False,
) -> TileConfig:
    """Default tile of the gather-GEMM.

    dtype: fp16, bf16 or fp32.  precision: of fp32, "ieee", "tf32" or "tf32x3"; "half" where fp16 is added up in fp16.
    order: which channels of the weight are next to each other, "oi" the input's, "io" the output's.  grouped: of the
    grouped one, whose rows are known before its reduction begins.

    A row has the same bits in every tile that this gives one layer, whatever the rows are.
    """
    n_rows, c_in, c_out, n_offsets, _ = size
    half = dtype in (torch.float16, torch.bfloat16)
    queued, roomy = ways(target, dtype, precision)
    if queued and not grouped:
        tile = None
        if precision != "half":
            tile = queued_tile(target, "ieee" if half else precision, size)
        if tile is not None:
            return clamp_for_smem(tile, target, dtype.itemsize)
    if roomy and wide_pays(target, n_rows, c_in, c_out, n_offsets * c_in * c_out * dtype.itemsize):
        generation = target.generation
        tile = TileConfig(*(generation.wide_turned if order == "io" else generation.wide))
        tile = clamp_for_smem(tile, target, dtype.itemsize)
        tile = clamp_for_registers(tile, target, dtype, precision, wgrad=False)
        return spread(target, tile, n_rows, c_out)
    many = n_rows >= 256 * target.compute_units
    most = roomy and n_rows >= MOST_ROWS * target.compute_units
    if precision == "ieee" and not half and many and c_in >= 256 and c_out >= 256:
        return clamp_for_registers(TileConfig(128, 128, 16, 4, 2), target, dtype, precision, wgrad=False)
    block_n = power(c_out, 16, 128)
    block_k = depth_of(precision if not half else "", c_in)
    if roomy and not most:
        block_k = power(c_in, 16, 128)
        while block_k > 16 and c_in % block_k and c_in % (block_k // 2) == 0:
            block_k //= 2
    # Without matrix units a thread wants more results to share its operands.
    taller = most or (precision == "ieee" and not half and many)
    block_m = 128 if taller and 32 <= block_n <= 64 else 64
    staged = most or (precision == "tf32x3" and block_n == 128)
    stages = 3 if staged or block_k * block_n <= 32 * 32 else 2
    tile = TileConfig(block_m, block_n, block_k, 4, stages)
    tile = clamp_for_registers(clamp_for_smem(tile, target, dtype.itemsize), target, dtype, precision, wgrad=False)
    return tile if grouped else spread(target, tile, n_rows, c_out)


def grouped_tile(
    target: Target, dtype: torch.dtype, size: GemmSize, precision: str = "ieee", order: str = "oi"
) -> TileConfig:
    """Default tile of the grouped gather-GEMM, whose rows are pairs; the rest as for `gather_tile`.

    Rows' addresses do not change along its reduction, so that shallow blocks in three stages beat
    the deep ones of the gather-GEMM (H200, 1024 channels: 88 and 102 us).
    """
    # Whichever channels of the weight are next to each other: 88 and 89 us.
    tile = gather_tile(target, dtype, size, precision, grouped=True)
    if tile.block_n == 256:
        tile = clamp_for_smem(TileConfig(*GROUPED_WIDE), target, dtype.itemsize)
        tile = clamp_for_registers(tile, target, dtype, precision, wgrad=False)
    return tile


_FEW_PAIRS = 1 << 15  # a power of two, as above


def wgrad_tile(
    target: Target, dtype: torch.dtype, c_in: int, c_out: int, precision: str = "ieee", n_pairs: int = 1 << 20
) -> TileConfig:
    """Default tile of wgrad."""
    if dtype in (torch.float16, torch.bfloat16):
        roomy = target.generation.deep_wgrad and target.shared_memory >= 128 << 10
        few = roomy and n_pairs < _FEW_PAIRS  # which large tiles leave to a few programs
        limit = 128 if max(c_in, c_out) > 128 and not few else 64
        m, n = power(c_in, 16, limit), power(c_out, 16, limit)
        deep = max(m, n) <= 64 and (few or (roomy and m * n <= 32 * 64))
        tile = TileConfig(m, n, 128, 4, 2) if deep else TileConfig(m, n, 64, 4, 3)
    elif precision == "tf32":
        tile = TileConfig(power(c_in, 16, 32), power(c_out, 16, 128), 64, 4, 2)
    else:
        depth = 16 if max(c_in, c_out) > 64 else 32
        tile = TileConfig(power(c_in, 16, 64), power(c_out, 16, 64), depth, 4, 3)
    return clamp_for_registers(clamp_for_smem(tile, target, dtype.itemsize), target, dtype, precision, wgrad=True)


# Operations per byte of memory traffic at which the matrix units of current GPUs are balanced.
INTENSITY = {"half": 200.0, "tf32": 100.0, "tf32x3": 33.0, "ieee": 14.0}
# What a device does in a microsecond; only their ratios matter.
_STEP = 0.25  # microseconds that a step of a program waits for its operands
_CACHED, MOVED = 75e3, 30e3  # bytes per compute unit out of the cache, out of memory
_LAUNCH = 4.0  # microseconds of one more kernel
_RESULTS = 32 << 10  # of programs that a compute unit holds at a time


def wgrad_shares(
    target: Target,
    tile: TileConfig,
    dtype: torch.dtype,
    precision: str,
    weight: tuple[int, int, int],
    groups: int,
    n_pairs: int,
    longest: int,
) -> int:
    """Programs per result block among which wgrad shares the pairs; 0 where one per offset, which
    leaves nothing to add up, is as fast.

    weight: (V, c_in, c_out) of a group.  longest: pairs of the offset that has most, about. A share
    more shortens the others' way and costs a partial result, written and read.
    """
    n_offsets, c_in, c_out = weight
    m, n, depth, units = tile.block_m, tile.block_n, tile.block_k, target.compute_units
    blocks = groups * -(-c_in // m) * -(-c_out // n)
    half = dtype != torch.float32 and target.has_matrix_units
    products = 2 * m * n * depth / (INTENSITY["half" if half else precision] * MOVED)
    busy = max((m + n) * depth * dtype.itemsize / _CACHED, products)
    steps, step = -(-n_pairs // depth), _STEP + busy
    partial = 8 * groups * c_in * c_out / (MOVED * units)
    fill = -(-max(1, min(4, _RESULTS // (m * n))) * units // blocks)
    shares = max(1, min(round((steps * step / partial) ** 0.5), fill, 4096))
    least = (steps + n_offsets) * blocks * busy / units  # of all programs together
    single = max(-(-longest // depth) * step, least)
    shared = max(steps / shares * step, least) + (shares + n_offsets) * partial + _LAUNCH
    return 0 if single <= shared else shares
