"""Default tiles of the gather-GEMM where loads of rows queue up (Hopper).

Measured on an H100 and an H200 over LiDAR and indoor scans. A row is summed by one program from
its first product to its last, so that few rows take as long as that chain of products: deep steps
with the rows of two of them under way keep it short. Many rows take as long as the weights, which
tiles of 128 rows read half as often.
"""

from __future__ import annotations

import dataclasses

from ..runtime.target import Target
from .tile import ROWS_OF_THREE, ROWS_OF_TWO, GemmSize, TileConfig, power

# Per compute unit: from here on rows of one tile are alike enough for larger tiles. A power of two,
# because plans decide once per octave.
MOST_ROWS = 2048
CACHED_WEIGHT = 40 << 20  # bytes

_FEW_OFFSETS = 8  # whose tiles are through before a queue of rows is full
_FEW_ROWS = 192  # per compute unit, below which a queue pays all the same


def wide_pays(target: Target, n_rows: int, c_in: int, c_out: int, weight: int) -> bool:
    """Whether the widest tiles pay: they fill the device, or the weight, of so many bytes, does not
    fit the cache and is read again for every tile of rows."""
    if c_in % 128 or c_out % 256:
        return False
    programs = -(-n_rows // 128) * (c_out // 256)
    return weight > CACHED_WEIGHT or 4 * programs >= 7 * target.compute_units


def spread(target: Target, tile: TileConfig, n_rows: int, c_out: int) -> TileConfig:
    """The tile with so few columns that a small problem keeps the device busy, down to what the
    same matrix instructions take: a row's bits do not depend on it.

    Nothing divides the reduction of one row among programs: where that was cut, its bits depended
    on how many rows there are.
    """
    units, n = target.compute_units, tile.block_n
    rows = -(-n_rows // tile.block_m)

    def programs() -> int:
        return rows * -(-c_out // n)

    if 20 * programs() >= 17 * units:
        return tile
    # Twice the columns halve what is read of x: 64 of them pay although some units have no work.
    enough = {64: 3 * units // 4, 32: units}
    while n > target.generation.least_columns and programs() < enough.get(n, 3 * units // 2):
        n //= 2
    if n == 64 and 0 < c_out % 64 <= 32:
        n = 32  # leaves no columns empty
    return dataclasses.replace(tile, block_n=n)


def depth_of(precision: str, c_in: int) -> int:
    """Channels of a step of fp32, at most. Of three TF32 products the small ones of a whole step
    are added first: there a row's bits depend on it, so it is the layer's alone."""
    depth = power(c_in, 16, 64)
    while depth > 16 and c_in % depth and c_in % (depth // 2) == 0:
        depth //= 2  # 96 channels: three even blocks of 32 beat two ragged ones of 64
    # Ragged blocks of 64 do not stay in registers under 64-bit offsets.
    return min(depth, 32) if precision == "tf32x3" and c_in % depth else depth


def queued_tile(target: Target, precision: str, size: GemmSize) -> TileConfig | None:
    """The tile of halves (precision "ieee"), or of fp32 by TF32 products, one or three; None where
    the tiles of other devices are as fast."""
    n_rows, c_in, c_out, n_offsets, expanding = size
    single = expanding and 1 < n_offsets <= _FEW_OFFSETS  # about one product a row
    if precision == "ieee":
        return (_spread_out if single else _of_halves)(target, size)
    if precision == "tf32" and max(c_in, c_out) > 64:
        if single:
            return None
        if c_out > 32 or n_rows < 64 * target.compute_units:
            return _of_wide_singles(target, size)
    return _of_singles(target, precision, size)


def _deepened(tile: TileConfig, c_in: int, deepest: int) -> TileConfig:
    """A tile of few results with steps as deep as the channels go into evenly, or at once."""
    if tile.block_n > 64:
        return tile
    depth = power(c_in, 16, deepest)
    if c_in > depth and c_in % depth:
        depth //= 2
    return dataclasses.replace(tile, block_k=max(tile.block_k, depth))


def _tall(programs: int, target: Target) -> bool:
    """Whether so many tiles of 128 rows keep the device busy."""
    return 4 * programs >= 5 * target.compute_units


def _spread_out(target: Target, size: GemmSize) -> TileConfig | None:
    """Halves of maps whose rows have about one product each."""
    n_rows, c_in, c_out, n_offsets, _ = size
    units, n = target.compute_units, power(c_out, 16, 128)
    if n_rows >= _FEW_ROWS * units or n_offsets * c_in * c_out * 2 > CACHED_WEIGHT:
        return None
    if max(n, c_in) <= 32:
        return _of_halves(target, size)
    if c_out % 128 == 0 and -(-n_rows // 64) * (c_out // 128) >= 4 * units:
        return TileConfig(128, 128, power(c_in, 16, 64), 4, ROWS_OF_TWO)
    return TileConfig(64, min(n, 64), power(c_in, 16, 64 if n_rows >= 64 * units else 128), 4, 3)


def _of_halves(target: Target, size: GemmSize) -> TileConfig | None:
    n_rows, c_in, c_out, n_offsets, _ = size
    units, n = target.compute_units, power(c_out, 16, 128)
    columns, short = -(-c_out // n), n_offsets <= _FEW_OFFSETS
    few = n_rows * columns < 512 * units
    if short and (n_offsets == 1 or n_rows >= _FEW_ROWS * units):
        return None
    if 2 * n_offsets * c_in * c_out > CACHED_WEIGHT:
        return None
    if not few and wide_pays(target, n_rows, c_in, c_out, 0):
        return None
    if n_rows >= MOST_ROWS * units and max(n, c_in) == 32:
        return None  # programs enough that one waits while others compute
    tall = not short and _tall(-(-n_rows // 128) * columns, target)
    if c_in > 64 and n <= 32 and n_rows < 64 * units:
        return _deepened(TileConfig(16, n, 64, 4, ROWS_OF_TWO), c_in, 128)
    if c_in > 64 and c_in % 64 == 32:
        # 96 channels: even blocks of 32; few programs are through sooner with one ragged block.
        if not few:
            return TileConfig(128, n, 32, 4, ROWS_OF_THREE)
        if 20 * -(-n_rows // 64) * columns >= 17 * units:
            return None
    deep = (c_in % 128 == 0 and (few or not tall)) or (c_in > 128 and not tall)
    depth = power(c_in, 16, 128 if deep else 64)
    tile = TileConfig(128 if tall else 64, n, depth, 4, ROWS_OF_TWO)
    return tile if tall else _deepened(spread(target, tile, n_rows, c_out), c_in, 256)


def _of_wide_singles(target: Target, size: GemmSize) -> TileConfig | None:
    """One TF32 product, of more than 64 channels."""
    n_rows, c_in, c_out, n_offsets, _ = size
    units, n, depth = target.compute_units, power(c_out, 16, 128), power(c_in, 16, 64)
    columns, short = -(-c_out // n), n_offsets <= _FEW_OFFSETS
    tiles = -(-n_rows // 64)
    if c_in > 64 and n <= 32:
        return _deepened(TileConfig(16, n, 64, 4, ROWS_OF_TWO), c_in, 128)
    if short and tiles * columns >= 2 * units:
        return None
    if not short and _tall(-(-n_rows // 128) * columns, target):
        return TileConfig(128, n, depth, 4, ROWS_OF_TWO)
    if not short and 4 * tiles * -(-c_out // 64) >= 7 * units:
        return TileConfig(64, min(n, 64), depth, 4, 2)
    tile = spread(target, TileConfig(64, min(n, 64), depth, 4, ROWS_OF_TWO), n_rows, c_out)
    return _deepened(tile, c_in, 128)


def _of_singles(target: Target, precision: str, size: GemmSize) -> TileConfig | None:
    """One TF32 product, or three, whose depth is the layer's."""
    n_rows, c_in, c_out, n_offsets, expanding = size
    units, n, depth = target.compute_units, power(c_out, 16, 128), depth_of(precision, c_in)
    tiles, three = -(-n_rows // 64), precision == "tf32x3"

    def programs(n: int) -> int:
        return tiles * -(-c_out // n)

    if n_offsets <= _FEW_OFFSETS:
        if not three or n <= 32 or n_offsets == 1:
            return None
        if programs(32) < units:
            return TileConfig(16, 64 if expanding else 32, depth, 4, 3)
        if expanding:
            return TileConfig(128 if n_rows >= 128 * units else 64, 32, depth, 4, 2)
        return TileConfig(64, 64 if programs(64) >= 2 * units else 32, depth, 4, 2)
    # Three products of a row are a chain three times as long, which programs of few rows hide.
    scarce = 2 * units if three and c_in < 256 else 5 * units // 6
    if programs(32) < scarce and target.generation.least_rows <= 16:
        return TileConfig(16, min(n, 32), depth, 4, ROWS_OF_TWO)
    if depth <= 32:  # 96 channels lose less in blocks of 32
        if n_rows < 256 * units or c_out <= 32:
            return TileConfig(64, min(n, 32), depth, 4, ROWS_OF_TWO)
        return TileConfig(128, 64 if three and c_out % 64 == 0 else 32, depth, 4, ROWS_OF_TWO)
    if c_out % 64 == 32:  # columns of 32 leave none empty
        many = n_rows >= 512 * units
        return TileConfig(128 if many else 64, 32, depth, 4, ROWS_OF_TWO if many else 2)
    if n > 64 and programs(128) >= 4 * units:
        return TileConfig(64, n, depth, 4, 2)
    if n > 32 and 4 * programs(64) >= 7 * units:
        return TileConfig(64, 64, depth, 4, 2)
    return TileConfig(64, min(n, 32), depth, 4, 2 if three else 3)
