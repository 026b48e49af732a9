"""Tiles: the knobs of one GEMM launch, and the default choice that needs no tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..runtime.target import Target


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """block_m x block_n results per program, reduced block_k at a time.

    For the gather-GEMM block_m counts rows; for wgrad it counts input channels and block_k pairs.
    split_k: how many programs share one reduction.  vendor: compile options of some backends.
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
        options.update(one for one in self.vendor if one[0] in target.generation.options)
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


def _taken(tile: TileConfig, target: Target, element_size: int) -> int:
    """Bytes of shared memory to reckon with. Where loads go straight into it, Triton 3.7 and newer
    keep two buffers there from two stages on, with up to a sixteenth of padding."""
    taken = tile.shared_bytes(element_size)
    if not target.generation.direct_to_shared:
        return taken
    buffers = dataclasses.replace(tile, num_stages=3).shared_bytes(element_size)
    return max(taken, buffers) * 17 // 16


def clamp_for_smem(tile: TileConfig, target: Target, element_size: int) -> TileConfig:
    """Give up stages, then depth, until the operands fit the target's shared memory."""
    while _taken(tile, target, element_size) > target.shared_memory:
        if tile.num_stages > 2:
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 16:
            tile = dataclasses.replace(tile, block_k=tile.block_k // 2)
        else:
            tile = dataclasses.replace(tile, block_n=tile.block_n // 2)
    return tile


_NORMED_RESULTS = 16  # of a thread; each has a column of its own, of up to five fp64 vectors
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
    return dataclasses.replace(
        tile, block_m=m, block_n=n, block_k=depth, num_warps=warps, num_stages=stages
    )


def clamp_for_problem(
    tile: TileConfig, target: Target, dtype: torch.dtype, precision: str, c_in: int, wide: bool,
    epilogue: int,
) -> TileConfig:  # fmt: skip
    """The gather-GEMM's tile, made smaller where one problem takes more registers than others.

    Under 64-bit offsets (wide) a thread holds fewer results, fewer still before a residual (8 in
    epilogue, see `GemmSpec`) and, for IEEE fp32 or on some generations, before a norm (2). Where
    rows are ragged (c_in no multiple of block_k), so that every element has an address of its own,
    it holds fewer channels then, and fewer results in the largest tiles. Where a norm follows,
    some hold fewer channels and results for IEEE fp32, and a thread that takes rows out of tensor
    memory holds few columns.
    """
    single, n, warps = dtype == torch.float32, tile.block_n, tile.num_warps
    generation = target.generation
    normed, plain = bool(epilogue & 2) and tile.split_k == 1, single and precision == "ieee"
    summed = bool(epilogue & 8) and wide and tile.split_k == 1
    fewer = summed or (normed and (generation.norm_halves or (wide and plain)))
    held = (32 if single else 64) // (2 if fewer else 1)
    narrow = normed and plain and generation.norm_narrows_fp32
    most = held * tile.num_warps * target.warp_size
    while (wide or narrow) and tile.block_m * n > most and n > 16:
        n //= 2
    ragged = c_in % tile.block_k != 0
    if ragged and tile.block_m * n >= 128 * 256:
        n //= 2
    if normed and generation.tensor_memory and not plain:
        most = _NORMED_RESULTS * target.warp_size
        while tile.block_m * n > most * warps and n > 16:
            n, warps = (n, 2 * warps) if warps < _WARPS else (n // 2, warps)
    depth = min(tile.block_k, 32) if narrow or (ragged and wide) else tile.block_k
    if normed and plain and ragged and wide:
        depth = min(depth, 16)
    if (n, depth, warps) == (tile.block_n, tile.block_k, tile.num_warps):
        return tile
    return dataclasses.replace(tile, block_n=n, block_k=depth, num_warps=warps)


def clamp_for_splits(tile: TileConfig) -> TileConfig:
    """The gather-GEMM's tile under mask splits, which take the place of shares of the reduction and
    leave sums in fp32: the largest tiles spill 16 bytes then (Triton 3.9, sm_80)."""
    n = tile.block_n // 2 if tile.block_m * tile.block_n >= 128 * 256 else tile.block_n
    return dataclasses.replace(tile, block_n=n, split_k=1)


def clamp_for_grouped(
    tile: TileConfig, target: Target, dtype: torch.dtype, precision: str, c_in: int, wide: bool
) -> TileConfig:
    """`clamp_for_problem` for the grouped gather-GEMM, where addresses of rows take registers, too:
    with 128 rows and 32 channels of IEEE fp32 a thread spills 20 bytes (Triton 3.9, sm_80)."""
    tile = clamp_for_problem(tile, target, dtype, precision, c_in, wide, 0)
    if dtype == torch.float32 and precision == "ieee" and tile.block_m >= 128:
        tile = dataclasses.replace(tile, block_k=min(tile.block_k, 16))
    return tile


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


def gather_tile(
    target: Target, dtype: torch.dtype, n_rows: int, c_in: int, c_out: int, n_offsets: int,
    precision: str = "ieee", order: str = "oi",
) -> TileConfig:  # fmt: skip
    """Default tile of the gather-GEMM; c_in and c_out are channels per group, precision is that of
    fp32, order says which channels of the weight are next to each other ("oi": the input's)."""
    half = dtype in (torch.float16, torch.bfloat16)
    roomy = half and target.shared_memory >= 128 << 10
    if roomy and _wide(target, n_rows, c_in, c_out, n_offsets * c_in * c_out * dtype.itemsize):
        generation = target.generation
        tile = TileConfig(*(generation.wide_turned if order == "io" else generation.wide))
        tile = clamp_for_smem(tile, target, dtype.itemsize)
        tile = clamp_for_registers(tile, target, dtype, precision, wgrad=False)
        split = split_for(target, tile, n_rows, c_in, c_out, n_offsets)
        return dataclasses.replace(tile, split_k=split)
    many = n_rows >= 256 * target.compute_units
    most = roomy and n_rows >= _MOST_ROWS * target.compute_units
    if precision == "ieee" and not half and many and c_in >= 256 and c_out >= 256:
        return clamp_for_registers(
            TileConfig(128, 128, 16, 4, 2), target, dtype, precision, wgrad=False
        )
    block_n = power(c_out, 16, 128)
    block_k = power(c_in, 16, 128 if roomy and not most else 64)
    while block_k > 16 and c_in % block_k and c_in % (block_k // 2) == 0:
        block_k //= 2  # 96 channels: three even blocks of 32 beat two ragged ones of 64
    # Without matrix units a thread wants more results to share its operands.
    taller = most or (precision == "ieee" and not half and many)
    block_m = 128 if taller and 32 <= block_n <= 64 else 64
    staged = most or (precision == "tf32x3" and block_n == 128)
    stages = 3 if staged or block_k * block_n <= 32 * 32 else 2
    tile = TileConfig(block_m, block_n, block_k, 4, stages)
    tile = clamp_for_registers(
        clamp_for_smem(tile, target, dtype.itemsize), target, dtype, precision, wgrad=False
    )
    split = split_for(target, tile, n_rows, c_in, c_out, n_offsets)
    return dataclasses.replace(tile, split_k=split)


def grouped_tile(
    target: Target, dtype: torch.dtype, n_pairs: int, c_in: int, c_out: int, n_offsets: int,
    precision: str = "ieee", order: str = "oi",
) -> TileConfig:  # fmt: skip
    """Default tile of the grouped gather-GEMM over `n_pairs` pairs; the rest as for `gather_tile`.

    Rows' addresses do not change along its reduction, so that shallow blocks in three stages beat
    the deep ones of the gather-GEMM (H200, 1024 channels: 88 and 102 us).
    """
    # Whichever channels of the weight are next to each other: 88 and 89 us.
    tile = gather_tile(target, dtype, n_pairs, c_in, c_out, n_offsets, precision)
    if tile.block_n == 256:
        tile = clamp_for_smem(TileConfig(*GROUPED_WIDE), target, dtype.itemsize)
        tile = clamp_for_registers(tile, target, dtype, precision, wgrad=False)
    return dataclasses.replace(tile, split_k=1)


def split_for(
    target: Target, tile: TileConfig, n_rows: int, c_in: int, c_out: int, n_offsets: int
) -> int:
    """How many programs share one reduction so that a short problem fills the device."""
    split, held = 1, 1 if tile.block_m * tile.block_n >= 128 * 256 else 2
    programs = -(-n_rows // tile.block_m) * -(-c_out // tile.block_n)
    depth = n_offsets * -(-c_in // tile.block_k)
    most = held * target.compute_units
    while programs * split * 2 <= most and depth >= 16 * split and split < 16:
        split *= 2
    return split


_FEW_PAIRS = 1 << 15  # a power of two, as above


def wgrad_tile(
    target: Target, dtype: torch.dtype, c_in: int, c_out: int, precision: str = "ieee",
    n_pairs: int = 1 << 20,
) -> TileConfig:  # fmt: skip
    """Default tile of wgrad; split_k is left to the launcher, which knows the number of blocks."""
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
