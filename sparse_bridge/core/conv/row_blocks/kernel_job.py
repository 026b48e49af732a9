"""Kernels under a limit: over some columns of a neighbour table at a time, whose order and
tiles are made for it and dropped behind it."""

from __future__ import annotations

import torch

from ....kernels.runtime.target import Target
from ....kernels.tiles.epilogue_bits import NORM
from ...maps.rulebook import Rulebook
from ...maps.views.view_set import Rebuild
from ..dataflow import LayerProduct
from ..kernel_products import GatherProduct, KernelDataflow
from ..torch_end import Finished
from .job import SLACK, Call, Job

_SORTED = 48  # bytes per row that the order of a table takes meanwhile


class RowBlock(Rulebook):
    """Some rows of one side of a rulebook, as side 0.

    nbr: their columns of the table.  backwards: its offsets run from the last one.
    """

    def __init__(self, nbr: torch.Tensor, n_in: int, backwards: bool, trained: bool) -> None:
        from ....kernels.maps.neighbor_table import NeighborTable

        view = NeighborTable(nbr)
        super().__init__(n_in, nbr.shape[1], nbr.shape[0], nbr.device, views=(view, None))
        self._backwards, self.trained = backwards, trained

    def table(self, side: int):  # type: ignore[no-untyped-def]
        return super().table(side)[0], self._backwards

    def neighbors(self, side: int) -> tuple[torch.Tensor, bool]:
        """(int32 [V, rows of the block], -1 where absent; whether offsets run backwards in the whole table)."""
        return super().neighbors(side)[0], self._backwards

    def tiles(self, side: int, target: Target):  # type: ignore[no-untyped-def]
        return super().tiles(side, target)[0], self._backwards


class KernelJob(Job):
    """Of dataflows that follow a table. With mask splits, which are used on request, in one piece:
    the sums of their parts follow the order of all rows."""

    def __init__(
        self, flow: KernelDataflow, product: LayerProduct, inner: GatherProduct | Finished, call: Call
    ) -> None:
        super().__init__(product, inner, call)
        self._flow, self._inner = flow, inner
        self._splits = getattr(flow, "splits", 1)
        self.divisible = self._splits == 1
        self._table: tuple[torch.Tensor, bool] | None = None
        self._normed = bool(product.epilogue.parts & NORM) and isinstance(inner, Finished)

    def one_piece(self) -> int:
        call, rulebook = self.call, self.call.rulebook
        flow, side = self._flow.serving(rulebook, call.side, self.product), self._side
        n_bytes = 0
        if flow.packed and not rulebook.tiled(side):
            n_bytes = self._tiles(call.n_rows)
        if not (rulebook.tabled(side) or (flow.packed and rulebook.tiled(side))):
            n_bytes += self.views()
        return n_bytes + self._copies() + self._sums(call.n_rows)

    @property
    def _side(self) -> int:
        return 0 if self.call.rulebook.symmetric else self.call.side

    def _tiles(self, n_rows: int) -> int:
        from ....kernels.maps.tile_list import TILE, TileList

        n_offsets, splits = self.product.w.n_offsets, self._splits
        size = TileList.size(n_offsets, -(-n_rows // (2 * TILE)), splits)
        masks = 4 * -(-n_offsets // 32)
        return 4 * size + splits * n_rows * (_SORTED + masks)

    def _copies(self) -> int:
        """Of the weight, where the kernel reads one, and what allocators add."""
        return (self.call.weight.nbytes if self._inner.copies else 0) + SLACK

    def _sums(self, n_rows: int) -> int:
        partial = 4 * self._splits * n_rows * self.columns if self._splits > 1 else 0
        return partial + self.end_bytes(n_rows, self._normed)

    def views(self) -> int:
        if self.call.rulebook.tabled(self._side):
            return 0
        return self.call.rulebook.making(self._side)

    def growth(self) -> int:
        return 4 * self.call.n_rows * self.product.w.n_offsets - self.call.rulebook.nbytes

    def prepare(self) -> None:
        rulebook, side = self.call.rulebook, self.call.side
        self._table = rulebook.neighbors(side)
        rulebook.keep_table(self._side)

    def block(self, height: int) -> int:
        table = 4 * height * self.product.w.n_offsets
        result = height * self.columns * self.size
        return table + self._tiles(height) + self._copies() + self._sums(height) + result

    def columns_of(self, begin: int, end: int) -> tuple[torch.Tensor, bool]:
        """(the table int32 [V, end - begin] of some rows, whether its offsets run backwards). After `prepare`."""
        assert self._table is not None
        return self._table[0][:, begin:end].contiguous(), self._table[1]

    def fill(self, y: torch.Tensor, height: int) -> None:
        """Write y [N_out, C_out], x's dtype, block by block, each by a table of its own."""
        for begin in range(0, self.call.n_rows, height):
            end = min(self.call.n_rows, begin + height)
            self._fill(y[begin:end], begin, end)

    def _fill(self, y: torch.Tensor, begin: int, end: int) -> None:
        """One block; what it needs goes with the call, before the next one's is made."""
        rulebook, _, x, weight, _ = self.call
        own, backwards = self.columns_of(begin, end)
        own_map = RowBlock(own, x.shape[0], backwards, rulebook.trained)
        y.copy_(self.inner(own_map, 0, x, weight, self.call.end_of(begin, end)))


class SearchJob(KernelJob):
    """Without a table: every block looks its neighbours up again."""

    @staticmethod
    def serves(call: Call) -> bool:
        """Whether parts of the call's table can be looked up alone."""
        rebuild = call.rulebook.rebuild
        return rebuild is not None and rebuild.by_rows and (call.side == 0 or call.rulebook.symmetric)

    @property
    def _rebuild(self) -> Rebuild:
        assert self.call.rulebook.rebuild is not None
        return self.call.rulebook.rebuild

    def views(self) -> int:
        return 0  # the map is let go of before anything is made

    def growth(self) -> int:
        return self._rebuild.searching - self.call.rulebook.nbytes

    def prepare(self) -> None:
        self.call.rulebook.drop()
        self._rebuild.search()

    def columns_of(self, begin: int, end: int) -> tuple[torch.Tensor, bool]:
        """(the table int32 [V, end - begin] of some rows, looked up now; whether its offsets run backwards). After
        `prepare`."""
        return self._rebuild.table_of(begin, end), bool(self.call.side)
