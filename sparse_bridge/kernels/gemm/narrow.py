"""Which products have inputs so narrow that one step of their reduction takes several offsets.
Needs no Triton."""

from __future__ import annotations

from ..tiles.narrow_tile import WIDEST, narrow_tile
from ..tiles.tile import TileConfig
from .product import Product


def packs_offsets(product: Product) -> bool:
    """Whether `narrow_gemm` serves a product over a table or over mask-ordered tiles."""
    w = product.w
    return w.c_in <= WIDEST and w.groups == 1 and w.n_offsets > 1 and product.precision != "half"


def tile_of(product: Product) -> TileConfig:
    """`narrow_tile` of a product."""
    target, _, dtype, precision, w, _ = product
    return narrow_tile(target, dtype, precision, w.c_in, w.c_out, w.n_offsets)
