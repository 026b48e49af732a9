"""The gather-GEMM of a layer with one tile, but for its map: worked out once for many maps."""

from __future__ import annotations

from typing import Any

import torch

from ..maps.tile_list import shared_by
from ..runtime.launch import number_of, specialise
from ..runtime.triton_compat import Entry
from ..tiles.activation_numbers import NUMBERS
from ..tiles.clamps import clamp_for_problem, clamp_for_splits
from ..tiles.tile import TileConfig
from .product import Product

INT32_END = 1 << 31  # from here on offsets need 64 bits


class GemmSpec:
    """A product and its tile.

    packed: over mask-ordered tiles; else over a neighbour table.  wide: offsets need 64 bits.
    splits: orders of the rows, each for a range of the offsets, whose partial sums are added up
    afterwards, see `TileList`; 1: nothing to add up.  constants, options: of the kernel.  key: a
    number for all that a compiled kernel depends on here and that no tensor tells.  following:
    c_in, c_out, where the weight starts, alpha, eps, the row strides of contiguous features and
    results and the weight's strides, in the kernel's order.  sum_constants: of the kernel that adds
    partial sums up.
    """

    def __init__(self, product: Product, tile: TileConfig, packed: bool, wide: bool = False, splits: int = 1) -> None:
        self.product, self.packed, self.wide, self._requested_tile = product, packed, wide, tile
        self.splits = splits
        target, self.device, self.dtype, precision, w, epilogue = product
        self.target, self.epilogue, self.w_stride = target, epilogue, abs(w.strides[0])
        c_in, c_out, self.groups = w.c_in, w.c_out, w.groups
        self.c_out, self.columns_in, self.columns = c_out, w.groups * c_in, w.groups * c_out
        parts, activation, alpha, eps = epilogue
        if splits > 1:
            tile = clamp_for_splits(tile)
        if not packed:
            tile = tile.over_table()
        unsplit = splits == 1
        fused_parts = parts if unsplit else 0
        tile = clamp_for_problem(tile, target, self.dtype, precision, c_in, wide, fused_parts)
        self.tile = tile
        self.activation = NUMBERS[activation]
        exact = self.dtype != torch.float32 and precision != "half"
        self.constants: tuple[object, ...] = (
            packed,
            parts if unsplit else 0,
            self.activation if unsplit else 0,
            "ieee" if exact else precision,
            c_in % tile.block_k == 0,
            c_in <= tile.block_k,
            wide,
            shared_by(tile.block_m) if packed else 1,
            tile.block_m,
            tile.block_n,
            tile.block_k,
        )
        self.options = tile.options(target)
        signature = specialise(c_in, c_out, w.shift, *w.strides, self.columns)
        self._key_parts: tuple[Any, ...] = ("gather_gemm", self.dtype, self.constants, tile, signature, splits > 1)
        self.key = number_of(self._key_parts)
        self.row_kind = specialise(self.columns_in)
        # The type of a float is part of the signature.
        self.floats = float(alpha), float(eps)
        self.following = (c_in, c_out, w.shift, *self.floats, self.columns_in, self.columns, *w.strides)
        self._wider: GemmSpec | None = None
        self.sum_constants: tuple[object, ...] = (parts, self.activation, splits, 1024)
        # By what of the operands compiled kernels depend on: the kernel, and that of the sums.
        self.variants: dict[tuple[object, ...], tuple[Entry, Entry | None]] = {}
        self.native: object = None  # a launch over tiles, by which the compiled helper makes others

    def fitting(self, n_offsets: int, pitch: int, n_rows: int, n_in: int) -> GemmSpec:
        """This one, or one with wide offsets, as a map of this size needs it."""
        if self.wide or not (
            n_in * self.columns_in >= INT32_END
            or self.splits * n_rows * self.columns >= INT32_END
            or (n_offsets + self.splits - 1) * pitch >= INT32_END
            or n_offsets * self.w_stride >= INT32_END
        ):
            return self
        if self._wider is None:
            self._wider = type(self)(self.product, self._requested_tile, self.packed, True, self.splits)
        return self._wider
