"""Gather-GEMM over the neighbour table, every offset for every row: nothing is sorted, which is
cheaper where a map is used once, or dense."""

from __future__ import annotations

import torch

from ....kernels.runtime.target import Target
from ...maps.rulebook import Rulebook
from ..kernel_products import KernelDataflow


class Unmasked(KernelDataflow):
    name, packed, packing = "unmasked", False, True

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[torch.Tensor, bool]:
        return rulebook.neighbors(side)


DATAFLOW = Unmasked()
