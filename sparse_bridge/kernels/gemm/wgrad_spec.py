"""The wgrad of a layer with one tile, but for its map: worked out once for many maps."""

from __future__ import annotations

import torch

from ..runtime.launch import cdiv, number_of, power_of_2, specialise
from ..tiles.tile import TileConfig
from .product import Product

SUM_BLOCKS = (64, 128, 256, 512, 1024)  # results per program that adds partials
SUM_LOADS = 4096  # partial results that such a program loads at a time


def sum_shape(results: int, n_offsets: int, compute_units: int) -> tuple[int, int]:
    """(shares that a program adds at a time, results of it): few programs, since each first finds
    the shares of its offset, but enough to draw on the whole memory."""
    per_program = results * n_offsets // (16 * compute_units)
    block = next((block for block in SUM_BLOCKS if block >= per_program), SUM_BLOCKS[-1])
    return SUM_LOADS // block, block


class WgradSpec:
    """A product and its tile; `product.w` says how the result lies in memory.

    mirrored: pair lists are of offsets 0 .. V / 2 only.  direct: no two programs share a result.
    wide: offsets need 64 bits.  constants, options, key: see `GemmSpec`.  before, trailing: the
    kernel's numbers before and after the row strides.  sum_*: of the kernel that adds the shares.
    """

    def __init__(
        self, product: Product, tile: TileConfig, mirrored: bool, direct: bool = False, wide: bool = False
    ) -> None:
        self.product, self.tile, self.mirrored = product, tile, mirrored
        self._flags = direct, wide
        target, self.device, self.dtype, self.precision, w, _ = product
        self.target, self.n_offsets, self.groups = target, w.n_offsets, w.groups
        self.sizes = n_offsets, c_in, c_out = w.n_offsets, w.c_in, w.c_out
        self.rows = self.columns_in, self.columns = w.groups * c_in, w.groups * c_out
        self.row_kinds = specialise(*self.rows)
        self.blocks = cdiv(c_in, tile.block_m) * cdiv(c_out, tile.block_n)
        self.layout, self.quads = (w.shift, *w.strides), cdiv(c_in * self.columns, 4)
        self.padding = 4 * self.quads - c_in * self.columns  # behind the values of a partial result
        v_block = max(16, power_of_2(n_offsets))
        self.constants = (
            mirrored,
            direct,
            self.precision if self.dtype == torch.float32 else "ieee",
            c_in % tile.block_m == 0 and c_out % tile.block_n == 0,
            wide,
            v_block,
            tile.block_m,
            tile.block_n,
            tile.block_k,
        )
        self.options = tile.options(target)
        layout = self.layout if direct else (0, 4 * self.quads, 1, c_in, c_in * c_out)
        self.key = number_of(("wgrad", self.dtype, self.constants, tile, specialise(c_in, c_out, *layout)))
        self.leading, self.trailing = (n_offsets, c_in, c_out, layout[0]), layout[1:]
        size = c_in * self.columns
        shape = sum_shape(size, n_offsets, target.compute_units)
        self.sum_constants = (mirrored, v_block, *shape)
        self.sum_grid = (cdiv(size, shape[1]), n_offsets, 1)
        self.sum_sizes = (n_offsets, c_in, c_out, self.columns, self.quads)
        self.sum_key = number_of(("sum", self.sum_constants, specialise(*self.layout)))
        self._others: dict[tuple[bool, bool], WgradSpec] = {}

    def fitting(self, direct: bool, wide: bool) -> WgradSpec:
        """This one, or one for maps of another size."""
        if self._flags == (direct, wide):
            return self
        spec = self._others.get((direct, wide))
        if spec is None:
            spec = WgradSpec(self.product, self.tile, self.mirrored, direct, wide)
            self._others[direct, wide] = spec
        return spec
