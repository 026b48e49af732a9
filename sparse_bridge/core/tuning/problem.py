"""What a tile is chosen for: one GEMM of one map, and the bucket of problems like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.gemm.product import Product, Weights
from ...kernels.runtime.target import Target
from ...kernels.tiles.tile import GemmSize, TileConfig


class Bucket(NamedTuple):
    """Problems that share a winner.

    rows: octave of the result rows per compute unit, 0 below one row each.  density: octave of the
    inputs per result row (fwd, dgrad) or of the pairs per row (wgrad): what the host knows without
    waiting for the device, since a bucket is asked for at every new map.
    """

    direction: str
    dataflow: str
    dtype: torch.dtype
    precision: str
    order: str
    c_in: int
    c_out: int
    groups: int
    n_offsets: int
    rows: int
    density: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        product = f"{self.dataflow}/{dtype}/{self.precision}/{self.order}"
        channels = f"c{self.c_in}x{self.c_out}/g{self.groups}"
        return f"{product}/{channels}/v{self.n_offsets}/r{self.rows}/d{self.density}"

    def neighbours(self) -> tuple[Bucket, ...]:
        """The buckets one octave away, nearest work first."""
        return (
            self._replace(density=self.density + 1),
            self._replace(density=self.density - 1),
            self._replace(rows=self.rows + 1),
            self._replace(rows=self.rows - 1),
        )


class Problem(NamedTuple):
    """One GEMM.

    direction: "fwd", "dgrad" or "wgrad".  dataflow: "masked", with mask splits "masked:S",
    "unmasked", "grouped", or "pairs" (wgrad).
    device: of the tensors.  precision: of the product, see `device.precision`.  order: "io" where
    the output channels of the weight are the closer ones in memory, else "oi".  n_rows, n_in: rows
    of the result and of what is gathered; for wgrad those of dy and x.  work: pairs (wgrad), else
    0.  c_in, c_out: channels per group of the product itself.  tile_rule: of its dataflow, the tile
    before tuning; None for `gather_tile`.
    """

    direction: str
    dataflow: str
    device: torch.device
    target: Target
    dtype: torch.dtype
    precision: str
    order: str
    c_in: int
    c_out: int
    groups: int
    n_offsets: int
    n_rows: int
    n_in: int
    work: int = 0
    tile_rule: Callable[[Problem], TileConfig] | None = None

    def bucket(self) -> Bucket:
        """The bucket; a function of the host's numbers alone."""
        many = self.work if self.direction == "wgrad" else self.n_in
        density = round(math.log2(max(many, 1) / max(self.n_rows, 1)))
        rows = (self.n_rows // self.target.compute_units).bit_length()
        return Bucket(
            self.direction,
            self.dataflow,
            self.dtype,
            self.precision,
            self.order,
            self.c_in,
            self.c_out,
            self.groups,
            self.n_offsets,
            rows,
            density,
        )

    @property
    def splits(self) -> int:
        """Mask splits: ranges of the offsets, each with sums of its own."""
        return min(int(self.dataflow.partition(":")[2] or 1), self.n_offsets)

    def default(self) -> TileConfig:
        """The tile that needs no tuning."""
        if self.direction == "wgrad":
            from ...kernels.tiles.tile_config import wgrad_tile

            return self._cut(wgrad_tile(self.target, self.dtype, self.c_in, self.c_out, self.precision, self.work))
        return self._cut(self.gather_tile() if self.tile_rule is None else self.tile_rule(self))

    def _cut(self, tile: TileConfig) -> TileConfig:
        from ...kernels.tiles.clamps import clamp_for_splits

        return tile if self.splits == 1 else clamp_for_splits(tile)

    @property
    def form(self) -> tuple[Target, torch.dtype, GemmSize, str, str]:
        """What `tile_config.gather_tile` and `grouped_tile` choose by, in their order."""
        size = GemmSize(self.n_rows, self.c_in, self.c_out, self.n_offsets, self.n_rows > self.n_in)
        return self.target, self.dtype, size, self.precision, self.order

    def gather_tile(self) -> TileConfig:
        """The usual tile of kernels that gather rows."""
        from ...kernels.tiles.tile_config import gather_tile

        return gather_tile(*self.form)

    def candidates(self) -> list[TileConfig]:
        """Tiles worth timing, the default first."""
        if self.precision == "half":
            return [self.default()]
        from ...kernels.tiles.candidates import candidates

        # Also where the map expands: the tile of other maps is worth timing there.
        size = GemmSize(self.n_rows, self.c_in, self.c_out, self.n_offsets)
        tiles = candidates(self.target, self.dtype, size, self.precision, self.direction, self.order)
        return list(dict.fromkeys([self.default(), *map(self._cut, tiles)]))

    def allows(self, tile: TileConfig) -> bool:
        """Whether a stored tile can run here: it fits the shared memory and the packed tiles, and
        gives a row's sum the bits that it has everywhere else."""
        from ...kernels.maps.tile_list import TILE
        from ...kernels.tiles.candidates import same_sums

        if tile.shared_bytes(self.dtype.itemsize) > self.target.shared_memory:
            return False
        return self.direction == "wgrad" or (
            tile.block_m <= 2 * TILE and same_sums(self.target, tile, self.default(), self.precision)
        )


def _order(w: Weights) -> str:
    return "oi" if abs(w.strides[1]) < abs(w.strides[2]) else "io"


def gather_problem(
    product: Product, dataflow: str, n_rows: int, n_in: int, tile_rule: Callable[[Problem], TileConfig] | None = None
) -> Problem:
    """The problem of a forward or dgrad product of `n_in` rows into `n_rows`; the rest as for `Problem`."""
    problem = _problem(product, "dgrad" if product.w.exchanged else "fwd", dataflow, n_rows, n_in)
    return problem._replace(tile_rule=tile_rule)


def wgrad_problem(product: Product, n_rows: int, n_in: int, n_pairs: int) -> Problem:
    """The problem of a weight gradient that lies as `product.w` says, over `n_pairs` pairs."""
    return _problem(product, "wgrad", "pairs", n_rows, n_in)._replace(work=n_pairs)


def _problem(product: Product, direction: str, dataflow: str, n_rows: int, n_in: int) -> Problem:
    target, device, dtype, precision, w, _ = product
    return Problem(
        direction,
        dataflow,
        device,
        target,
        dtype,
        precision if dtype == torch.float32 or precision == "half" else "ieee",
        _order(w),
        w.c_in,
        w.c_out,
        w.groups,
        w.n_offsets,
        n_rows,
        n_in,
    )
