"""Gather-GEMM over the neighbour table, every offset for every row: nothing is sorted, which is
cheaper where a map is used once, or dense."""

from __future__ import annotations

import torch

from ....kernels.gemm.product import Product
from ....kernels.runtime.target import Target
from ...maps.rulebook import Rulebook
from ..kernel_products import OVER_TABLE, KernelDataflow


class Unmasked(KernelDataflow):
    """Gather-GEMM over the neighbour table int32 [V, N] as it is."""

    name, packed, packing, same_sums = "unmasked", False, True, True

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[torch.Tensor, bool]:
        """See `Rulebook.neighbors`: (int32 [V, n_rows[side]], whether its offsets run backwards)."""
        return rulebook.neighbors(side)

    def by_helper(self, product: Product) -> tuple[int, int, int, int]:
        return OVER_TABLE, 0, -1, -1


DATAFLOW = Unmasked()
