"""Gather-GEMM over mask-ordered tiles (masked implicit GEMM): a program visits the offsets that its
rows have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....kernels.runtime.target import Target
from ...maps.rulebook import Rulebook
from ..kernel_products import KernelDataflow

if TYPE_CHECKING:
    from ....kernels.maps.mask_order import TileList


class Masked(KernelDataflow):
    name, packed = "masked", True

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[TileList, bool]:
        return rulebook.tiles(side, target)


DATAFLOW = Masked()
