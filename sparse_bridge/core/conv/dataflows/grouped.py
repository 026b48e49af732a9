"""All offsets in one launch, each tile of pairs for one of them: for irregular maps, such as
graphs, where an offset meets a row more than once, and on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ....kernels.gemm.product import Product
from ....kernels.runtime.target import Target
from ...maps.pair_groups import PairGroups, likely_pairs, pair_groups
from ...maps.rulebook import Rulebook
from ...tuning.problem import Problem
from ..kernel_products import KernelDataflow

if TYPE_CHECKING:
    from ....kernels.gemm.grouped_gemm import GroupedGemm
    from ....kernels.tiles.tile import TileConfig


class _DryGroups:
    """Stands for `PairGroups` where a launch only compiles."""

    def __init__(self) -> None:
        from ....kernels.gemm.grouped_gemm import Groups

        single, double = (torch.empty(n, dtype=torch.int32) for n in (1, 2))
        self.groups = Groups(single, single, double)

    def tiles(self, block_m: int) -> torch.Tensor:
        return torch.empty((1, 4), dtype=torch.int32)


class Grouped(KernelDataflow):
    """One launch over tiles of pairs, each of one kernel offset. Products [P, C_out] are in fp32, then added up."""

    name, packed, irregular = "grouped", False, True

    def view(self, rulebook: Rulebook, side: int, target: Target) -> tuple[PairGroups, bool]:
        return pair_groups(rulebook, side, target), False

    def work(self, table: Any, n_rows: int) -> int:
        pairs: int = table.n_pairs
        return max(pairs, 1)

    def likely_work(self, n_offsets: int, n_rows: int) -> int:
        return likely_pairs(n_offsets, n_rows)

    def dry_table(self, n_offsets: int) -> _DryGroups:
        return _DryGroups()

    def tile_rule(self, problem: Problem) -> TileConfig:
        from ....kernels.tiles.tile_config import grouped_tile

        return grouped_tile(*problem.form)

    def spec(self, product: Product, tile: TileConfig) -> Any:
        from ....kernels.gemm.grouped_gemm import GroupedSpec

        return GroupedSpec(product, tile)

    def launch(self, spec: Any, table: Any, n_rows: int, n_in: int) -> GroupedGemm:
        from ....kernels.gemm.grouped_gemm import GroupedGemm

        return GroupedGemm(spec, table.groups, table.tiles(spec.tile.block_m), n_rows, n_in)


DATAFLOW = Grouped()
