"""Gather-GEMM over mask-ordered tiles (masked implicit GEMM): a program visits the offsets that its
rows have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....kernels.gemm.product import Product
from ....kernels.runtime.target import Target
from ...maps.rulebook import Rulebook
from .. import registry
from ..choice import flow_of
from ..dataflow import Dataflow, LayerProduct
from ..kernel_products import KernelDataflow

if TYPE_CHECKING:
    from ....kernels.maps.tile_list import TileList


class Masked(KernelDataflow):
    name, packed = "masked", True

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[TileList, bool]:
        return rulebook.tiles(side, target)

    def by_rule(self) -> Dataflow:
        return BY_RULE


class _ByRule(Masked):
    """Kernels as nobody forces them: the dataflow that the rules name for each map."""

    def serving(
        self, rulebook: Rulebook, side: int, product: Product | LayerProduct
    ) -> KernelDataflow:
        flow = registry.entry(flow_of(rulebook, side, product))
        assert isinstance(flow, KernelDataflow)
        return flow

    def serves(self, rulebook: Rulebook, side: int, product: LayerProduct) -> str:
        return self.serving(rulebook, side, product).name


DATAFLOW, BY_RULE = Masked(), _ByRule()
