"""Gather-GEMM over mask-ordered tiles of which long ones are shared by several programs: for maps
of so few rows that a launch of the masked dataflow lasts as long as its longest tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....kernels.gemm.product import Product
from ....kernels.runtime.target import Target
from ....kernels.tiles.tile_config import TileConfig
from ...maps.rulebook import Rulebook
from .. import registry
from ..dataflow import Case, LayerProduct, Reason
from ..kernel_products import KernelDataflow

if TYPE_CHECKING:
    from ....kernels.gemm.balanced_gemm import BalancedGemm
    from ....kernels.maps.tile_list import TileList


class Balanced(KernelDataflow):
    """Maps of more tiles than a program looks at are served by the masked dataflow."""

    name, packed = "balanced", True

    def unsupported_reasons(self, case: Case) -> list[Reason]:
        found = super().unsupported_reasons(case)
        target = None if found else self.target(case)
        if target is not None and not target.hands_sums:
            text = "its programs hand each other sums, which is proven on NVIDIA's GPUs alone"
            found.append(Reason(text, device=True))
        return found

    def serving(
        self, rulebook: Rulebook, side: int, product: Product | LayerProduct
    ) -> KernelDataflow:
        from ....kernels.gemm.balanced_gemm import MOST_TILES
        from ....kernels.maps.tile_list import TILE

        if rulebook.n_rows[side] <= (MOST_TILES - 1) * TILE:  # tiles come in pairs
            return self
        masked = registry.entry("masked")
        assert isinstance(masked, KernelDataflow)
        return masked

    def serves(self, rulebook: Rulebook, side: int, product: LayerProduct) -> str:
        return self.serving(rulebook, side, product).name

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[TileList, bool]:
        return rulebook.tiles(side, target)

    def spec(self, product: Product, tile: TileConfig) -> Any:
        from ....kernels.gemm.balanced_gemm import BalancedSpec

        return BalancedSpec(product, tile)

    def launch(self, spec: Any, table: Any, n_rows: int, n_in: int) -> BalancedGemm:
        from ....kernels.gemm.balanced_gemm import BalancedGemm

        return BalancedGemm(spec, table, n_rows, n_in)


DATAFLOW = Balanced()
