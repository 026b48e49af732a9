"""Gather-GEMM over mask-ordered tiles (masked implicit GEMM): a program visits the offsets that its
rows have. With mask splits each range of the offsets has an order of its own, and its own sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....kernels.gemm.product import Product
from ....kernels.runtime.target import Target
from ...maps.rulebook import Rulebook
from .. import registry
from ..choice import is_stem, serving_flow, unordered_rows
from ..dataflow import Dataflow, LayerProduct
from ..kernel_products import BY_PYTHON, OVER_TABLE, OVER_TILES, KernelDataflow

if TYPE_CHECKING:
    from ....kernels.maps.tile_list import TileList
    from ....kernels.tiles.tile import TileConfig


class Masked(KernelDataflow):
    """splits: ranges of the offsets, at most as many as there are; their sums are added in order.
    A map that takes gradients of weights has the order of all offsets, too."""

    packed = True

    def __init__(self, splits: int = 1) -> None:
        self.splits, self.packing, self.same_sums = splits, splits == 1, splits == 1
        self.name = "masked" if splits == 1 else f"masked:{splits}"

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[TileList, bool]:
        splits = min(self.splits, rulebook.n_offsets)
        if splits == 1:
            return rulebook.tiles(side, target)
        return split_tiles(rulebook, side, target, splits)

    def spec(self, product: Product, tile: TileConfig) -> Any:
        splits = min(self.splits, product.w.n_offsets)
        if splits == 1:
            return super().spec(product, tile)
        from ....kernels.gemm.gather_spec import GemmSpec

        return GemmSpec(product, tile, True, splits=splits)

    def by_rule(self) -> Dataflow:
        return BY_RULE

    def by_helper(self, product: Product) -> tuple[int, int, int, int]:
        return (OVER_TILES if self.splits == 1 else BY_PYTHON), 0, 0, 0


class _ByRule(Masked):
    """Kernels as nobody forces them: the dataflow that the rules name for each map."""

    def serving(self, rulebook: Rulebook, side: int, product: Product | LayerProduct) -> KernelDataflow:
        return kernels_of(serving_flow(rulebook, side, product))

    def possible(self, rulebook: Rulebook, side: int, product: Product | LayerProduct) -> list[KernelDataflow]:
        flow = self.serving(rulebook, side, product)
        # Rows of such a map may come ordered, as layers of larger scenes wanted them.
        return [flow] if flow.packed or is_stem(product) else [flow, DATAFLOW]

    def by_helper(self, product: Product) -> tuple[int, int, int, int]:
        flow = OVER_TABLE if is_stem(product) else OVER_TILES
        return flow, *unordered_rows(product)

    def serves(self, rulebook: Rulebook, side: int, product: LayerProduct) -> str:
        return self.serving(rulebook, side, product).name


def kernels_of(name: str) -> KernelDataflow:
    """The dataflow of that name, which is one of kernels."""
    flow = registry.entry(name)
    assert isinstance(flow, KernelDataflow)
    return flow


def split_tiles(rulebook: Rulebook, side: int, target: Target, splits: int) -> tuple[TileList, bool]:
    """(tiles of `side` with `splits` orders, whether their offsets run backwards); made once, kept
    with the rulebook, without waiting for the device."""
    from ....kernels.maps.mask_order import mask_order
    from ....kernels.maps.tile_packing import pack_tiles

    reverse = side == 1 and rulebook.symmetric
    key = ("split tiles", 0 if reverse else side, splits)
    tiles: TileList | None = rulebook.cache.get(key)
    if tiles is None:
        table = rulebook.table(side)[0]
        order = mask_order(table, target, splits)
        tiles = rulebook.cache.put(key, pack_tiles(table, order, target, splits))
    return tiles, reverse


DATAFLOW, BY_RULE = Masked(), _ByRule()
VARIANTS = {str(splits): Masked(splits) for splits in (2, 3, 4)}
