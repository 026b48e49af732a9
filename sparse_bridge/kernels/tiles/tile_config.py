"""The default choice of a tile, which needs no tuning."""

from __future__ import annotations

import dataclasses

import torch

from ..runtime.target import Target
from .clamps import clamp_for_registers, clamp_for_smem
from .tile import ROWS_OF_THREE, ROWS_OF_TWO, TileConfig, power

# Per compute unit: from here on rows of one tile are alike enough for larger tiles. A power of two,
# because plans decide once per octave.
_MOST_ROWS = 2048
CACHED_WEIGHT = 40 << 20  # bytes


GROUPED_WIDE = (128, 256, 64, 8, 3)


def _wide(target: Target, n_rows: int, c_in: int, c_out: int, weight: int) -> bool:
    """Whether the widest tiles pay: they fill the device, or the weight, of so many bytes, does not
    fit the cache and is read again for every tile of rows."""
    if c_in % 128 or c_out % 256:
        return False
    programs = -(-n_rows // 128) * (c_out // 256)
    return weight > CACHED_WEIGHT or 4 * programs >= 7 * target.compute_units


_FEW_OFFSETS = 8  # whose tiles are through before a queue of rows is full
_FEW_ROWS = 192  # per compute unit, below which a queue pays all the same


def _spread(target: Target, tile: TileConfig, n_rows: int, c_out: int) -> TileConfig:
    """The tile with so few columns that a small problem keeps the device busy, down to what the
    same matrix instructions take: a row's bits do not depend on it.

    Nothing divides the reduction of one row among programs: where that was cut, its bits depended
    on how many rows there are.
    """
    units, n = target.compute_units, tile.block_n
    rows = -(-n_rows // tile.block_m)
    if 20 * rows * -(-c_out // n) >= 17 * units:
        return tile
    while 2 * rows * -(-c_out // n) < 3 * units and n > target.generation.least_columns:
        n //= 2
    return dataclasses.replace(tile, block_n=n)


def _queued(
    target: Target, n_rows: int, c_in: int, c_out: int, n_offsets: int
) -> TileConfig | None:
    """The tile of halves that keeps the rows of two steps under way; None where another is faster.

    Measured on an H100 and an H200 over LiDAR and indoor scans. Most that moves between L2 and the
    multiprocessors is weights, which tiles of 128 rows read half as often.
    """
    units, n = target.compute_units, power(c_out, 16, 128)
    columns, short = -(-c_out // n), n_offsets <= _FEW_OFFSETS
    few = n_rows * columns < 512 * units
    if short and (n_offsets == 1 or n_rows >= _FEW_ROWS * units):
        return None
    if 2 * n_offsets * c_in * c_out > CACHED_WEIGHT:
        return None
    if not few and _wide(target, n_rows, c_in, c_out, 0):
        return None
    if n_rows >= _MOST_ROWS * units and max(n, c_in) == 32:
        return None  # programs enough that one waits while others compute
    tall = not short and 4 * -(-n_rows // 128) * columns >= 5 * units
    if c_in > 64 and c_in % 64 == 32:
        # 96 channels: even blocks of 32; few programs are through sooner with one ragged block.
        if few and 20 * -(-n_rows // 64) * columns >= 17 * units:
            return None
        return (
            TileConfig(64, n, 64, 4, ROWS_OF_TWO)
            if few
            else TileConfig(128, n, 32, 4, ROWS_OF_THREE)
        )
    deep = (c_in % 128 == 0 and (few or not tall)) or (c_in > 128 and not tall)
    return TileConfig(128 if tall else 64, n, power(c_in, 16, 128 if deep else 64), 4, ROWS_OF_TWO)


def _single(target: Target, n_rows: int, c_in: int, c_out: int, depth: int) -> TileConfig:
    """The tile of fp32 by TF32 products on Hopper, one or three; measured for three on an H100,
    over the same scans. depth: block_k, which is the layer's."""
    units, n = target.compute_units, power(c_out, 16, 128)
    tiles = -(-n_rows // 64)

    def programs(n: int) -> int:
        return tiles * -(-c_out // n)

    if programs(32) * 6 < 5 * units and target.generation.least_rows <= 16:
        return TileConfig(16, min(n, 32), depth, 4, ROWS_OF_TWO)
    if depth <= 32:  # 96 channels lose less in blocks of 32
        many = n_rows >= 256 * units and c_out > 32
        return (
            TileConfig(128, min(n, 32), depth, 4, 3)
            if many
            else TileConfig(64, min(n, 32), depth, 4, ROWS_OF_TWO)
        )
    if n > 64 and programs(128) >= 4 * units:
        return TileConfig(64, n, depth, 4, 3)
    if n > 32 and 4 * programs(64) >= 7 * units:
        return TileConfig(64, 64, depth, 4, 2)
    return TileConfig(64, min(n, 32), depth, 4, 3)


def depth_of(precision: str, c_in: int) -> int:
    """Channels of a step of fp32, at most. Of three TF32 products the small ones of a whole step
    are added first: there a row's bits depend on it, so it is the layer's alone."""
    depth = power(c_in, 16, 64)
    while depth > 16 and c_in % depth and c_in % (depth // 2) == 0:
        depth //= 2  # 96 channels: three even blocks of 32 beat two ragged ones of 64
    # Ragged blocks of 64 do not stay in registers under 64-bit offsets.
    return min(depth, 32) if precision == "tf32x3" and c_in % depth else depth


def gather_tile(
    target: Target, dtype: torch.dtype, n_rows: int, c_in: int, c_out: int, n_offsets: int,
    precision: str = "ieee", order: str = "oi", grouped: bool = False,
) -> TileConfig:  # fmt: skip
    """Default tile of the gather-GEMM; c_in and c_out are channels per group, precision is that of
    fp32, order says which channels of the weight are next to each other ("oi": the input's).
    grouped: of the grouped one, whose rows are known before its reduction begins.

    A row has the same bits in every tile that this gives one layer, whatever n_rows is.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    roomy = half and target.shared_memory >= 128 << 10
    if target.queues_rows and not grouped and precision != "half":
        tile = None
        if half:
            tile = _queued(target, n_rows, c_in, c_out, n_offsets)
        elif precision != "ieee" and n_offsets > _FEW_OFFSETS:
            tile = _single(target, n_rows, c_in, c_out, depth_of(precision, c_in))
        if tile is not None:
            return _spread(target, tile, n_rows, c_out) if half else tile
    if roomy and _wide(target, n_rows, c_in, c_out, n_offsets * c_in * c_out * dtype.itemsize):
        generation = target.generation
        tile = TileConfig(*(generation.wide_turned if order == "io" else generation.wide))
        tile = clamp_for_smem(tile, target, dtype.itemsize)
        tile = clamp_for_registers(tile, target, dtype, precision, wgrad=False)
        return _spread(target, tile, n_rows, c_out)
    many = n_rows >= 256 * target.compute_units
    most = roomy and n_rows >= _MOST_ROWS * target.compute_units
    if precision == "ieee" and not half and many and c_in >= 256 and c_out >= 256:
        return clamp_for_registers(
            TileConfig(128, 128, 16, 4, 2), target, dtype, precision, wgrad=False
        )
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
    tile = clamp_for_registers(
        clamp_for_smem(tile, target, dtype.itemsize), target, dtype, precision, wgrad=False
    )
    return tile if grouped else _spread(target, tile, n_rows, c_out)


def grouped_tile(
    target: Target, dtype: torch.dtype, n_pairs: int, c_in: int, c_out: int, n_offsets: int,
    precision: str = "ieee", order: str = "oi",
) -> TileConfig:  # fmt: skip
    """Default tile of the grouped gather-GEMM over `n_pairs` pairs; the rest as for `gather_tile`.

    Rows' addresses do not change along its reduction, so that shallow blocks in three stages beat
    the deep ones of the gather-GEMM (H200, 1024 channels: 88 and 102 us).
    """
    # Whichever channels of the weight are next to each other: 88 and 89 us.
    tile = gather_tile(target, dtype, n_pairs, c_in, c_out, n_offsets, precision, grouped=True)
    if tile.block_n == 256:
        tile = clamp_for_smem(TileConfig(*GROUPED_WIDE), target, dtype.itemsize)
        tile = clamp_for_registers(tile, target, dtype, precision, wgrad=False)
    return tile


_FEW_PAIRS = 1 << 15  # a power of two, as above


def wgrad_tile(
    target: Target, dtype: torch.dtype, c_in: int, c_out: int, precision: str = "ieee",
    n_pairs: int = 1 << 20,
) -> TileConfig:  # fmt: skip
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
    return clamp_for_registers(
        clamp_for_smem(tile, target, dtype.itemsize), target, dtype, precision, wgrad=True
    )


# Operations per byte of memory traffic at which the matrix units of current GPUs are balanced.
INTENSITY = {"half": 200.0, "tf32": 100.0, "tf32x3": 33.0, "ieee": 14.0}
# What a device does in a microsecond; only their ratios matter.
_STEP = 0.25  # microseconds that a step of a program waits for its operands
_CACHED, MOVED = 75e3, 30e3  # bytes per compute unit out of the cache, out of memory
_LAUNCH = 4.0  # microseconds of one more kernel
_RESULTS = 32 << 10  # of programs that a compute unit holds at a time


def wgrad_shares(
    target: Target, tile: TileConfig, dtype: torch.dtype, precision: str,
    weight: tuple[int, int, int], groups: int, n_pairs: int, longest: int,
) -> int:  # fmt: skip
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
