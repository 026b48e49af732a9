"""Which products have inputs so narrow that one step of their reduction takes several offsets.
Needs no Triton."""

from __future__ import annotations

from ..tiles.narrow_tile import WIDEST, NarrowTile, narrow_tile, width_of
from .product import Product

# Rows of a compute unit from which on channels that are loaded one by one are slower (H200, 5 -> 32
# channels, 378k rows: 34.2 us, 31.7 by the gather-GEMM). A power of two: plans decide by octaves.
_MANY_ROWS = 2048


def packs_offsets(product: Product, n_rows: int) -> bool:
    """Whether `narrow_gemm` serves a product into so many rows, over a table or over mask-ordered
    tiles."""
    w = product.w
    if w.c_in > WIDEST or w.groups > 1 or w.n_offsets < 2 or product.precision == "half":
        return False
    singly = 4 < w.c_in < width_of(w.c_in)
    return not singly or n_rows < _MANY_ROWS * product.target.compute_units


def tile_of(product: Product) -> NarrowTile:
    """`narrow_tile` of a product."""
    target, _, dtype, precision, w, _ = product
    return narrow_tile(target, dtype, precision, w.c_in, w.c_out, w.n_offsets)
