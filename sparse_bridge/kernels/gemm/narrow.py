"""Which products have inputs so narrow that one step of their reduction takes several offsets.
Needs no Triton."""

from __future__ import annotations

from ..tiles.narrow_tile import WIDEST, narrow_tile
from ..tiles.tile import TileConfig
from .product import Product, Weights


def packs_offsets(w: Weights, precision: str) -> bool:
    """Whether `narrow_gemm` serves a product over a table or over mask-ordered tiles."""
    return w.c_in <= WIDEST and w.groups == 1 and w.n_offsets > 1 and precision != "half"


def tile_of(product: Product) -> TileConfig:
    """`narrow_tile` of a product."""
    target, _, dtype, precision, w, _ = product
    return narrow_tile(target, dtype, precision, w.c_in, w.c_out, w.n_offsets)
