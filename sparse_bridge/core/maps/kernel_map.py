"""Kernel maps (rulebooks): which input row meets which output row at which kernel offset.

A `Rulebook` is immutable geometry with lazily built views: a neighbour table and mask-ordered tiles
for each direction, pair lists per offset. A `KernelMap` is a rulebook read in one direction;
`transposed` reads it in the other at no cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ...kernels.runtime.target import Target
from ..capture.padded import PaddedScene, UnpaddedError
from .coordinate_map import Duplicates
from .host_index import PairLists

if TYPE_CHECKING:
    from ...kernels.maps.mask_order import TileList
    from ...kernels.maps.neighbor_table import NeighborTable

__all__ = ["DevicePairs", "KernelMap", "Rulebook"]


@dataclasses.dataclass(eq=False)
class DevicePairs:
    """Pair lists int32 with their starts int64 [L + 1] on the device; see `PairLists` for the
    rest. The lists of a padded scene have room for more pairs than they hold.

    likely: about how many pairs they hold.
    """

    in_rows: torch.Tensor
    out_rows: torch.Tensor
    starts: torch.Tensor
    mirrored: bool
    likely: int


class Rulebook:
    """Pairs (x row, y row) of V offsets. Side 0 gathers x rows for every y row, side 1 y rows for
    every x row.

    symmetric: submanifold; x and y rows are the same rows, and side 1 is side 0 with its offsets
    reversed. regular: an offset meets each row at most once, so tables can hold it; None (pair
    lists of the user) to look when asked.  scene: the padded scene it is of, if it is.
    """

    def __init__(
        self, n_x: int, n_y: int, n_offsets: int, device: torch.device, *, symmetric: bool = False,
        center: int = -1, tables: tuple[NeighborTable | None, NeighborTable | None] = (None, None),
        lists: PairLists | None = None, regular: bool | None = True,
        views: Sequence[NeighborTable | TileList | None] = (None, None),
        scene: PaddedScene | None = None,
    ) -> None:  # fmt: skip
        self.n_rows, self.scene = (n_y, n_x), scene
        self.n_offsets, self.device, self.symmetric, self.center = (
            n_offsets,
            device,
            symmetric,
            center,
        )
        self._tables: list[NeighborTable | None] = list(tables)
        self._tiles: list[TileList | None] = [None, None]
        # Sides whose tiles were asked for, and those of which anything was.
        self.tiled: set[int] = set()
        self.asked: set[int] = set()
        self._lists, self._given = lists, lists is not None
        self._pairs: DevicePairs | None = None
        self._regular = regular
        self.chunks: dict[Any, Any] = {}
        self.plans: dict[Any, Any] = {}
        for side, view in enumerate(views):
            self._adopt(side, view)

    def _adopt(self, side: int, view: NeighborTable | TileList | None) -> None:
        """Take over a table, perhaps with columns that are not in use, or tiles of one."""
        if view is None:
            return
        if view.tiled:
            tiles = cast("TileList", view)
            tiles.n_rows = self.n_rows[side]
            self._tiles[side] = tiles
        else:
            self._tables[side] = cast("NeighborTable", view)

    @property
    def regular(self) -> bool:
        if self._regular is None:
            lists = self.lists()
            lengths = torch.tensor(lists.starts, device=self.device).diff()
            v = torch.arange(self.n_offsets, device=self.device).repeat_interleave(lengths)
            self._regular = all(
                torch.unique(v * n + rows).shape[0] == rows.shape[0]
                for rows, n in ((lists.in_rows, self.n_rows[1]), (lists.out_rows, self.n_rows[0]))
            )
        return self._regular

    def table(self, side: int) -> tuple[NeighborTable, bool]:
        """(neighbour table [V, n_rows[side]], whether its offsets run backwards)."""
        if side == 1 and self.symmetric:
            return self.table(0)[0], True
        found = self._tables[side]
        self.asked.add(side)
        if found is None:
            tiles = self._tiles[side]
            found = self._scatter(side) if tiles is None else tiles.table()
            self._tables[side] = found
        elif found.count is not None:
            found = self._tables[side] = found.used(self.n_rows[side])
        return found, False

    def _scatter(self, side: int) -> NeighborTable:
        from ...kernels.maps.neighbor_table import NeighborTable

        nbr = torch.full(
            (self.n_offsets, self.n_rows[side]), -1, dtype=torch.int32, device=self.device
        )
        for v in range(self.n_offsets):
            x_rows, y_rows = self.pair_list(v)
            where, what = (y_rows, x_rows) if side == 0 else (x_rows, y_rows)
            nbr[v].index_copy_(0, where, what.int())
        return NeighborTable(nbr)

    def tiles(self, side: int, target: Target) -> tuple[TileList, bool]:
        """(mask-ordered tiles of `side`, whether their offsets run backwards)."""
        reverse = side == 1 and self.symmetric
        side = 0 if reverse else side
        found = self._tiles[side]
        self.tiled.add(side)
        self.asked.add(side)
        if found is None:
            from ...kernels.maps.mask_order import mask_order, pack_tiles

            table = self._tables[side] or self.table(side)[0]
            found = pack_tiles(table, mask_order(table, target), target)
            found.n_rows = self.n_rows[side]
            self._tiles[side] = found
            self._tables[side] = None  # the tiles hold it all, in another order
        return found, reverse

    def _known(self, side: int) -> bool:
        return self._tables[side] is not None or self._tiles[side] is not None

    def lists(self) -> PairLists:
        """Pair lists with host starts; waits for the device where only tables exist."""
        if self._lists is None:
            if self.scene is not None:
                raise UnpaddedError("A list of pairs needs the number of rows on the host.")
            side = 0 if self._known(0) else 1
            table = self.table(side)[0]
            n_lists = self.n_offsets // 2 + 1 if self.symmetric else self.n_offsets
            present = table.nbr[:n_lists] >= 0
            rows = present.nonzero()[:, 1]
            found = table.nbr[:n_lists][present].long()
            x_rows, y_rows = (found, rows) if side == 0 else (rows, found)
            starts = [0, *present.sum(1).cumsum(0).tolist()]
            self._lists = PairLists(x_rows, y_rows, starts, self.symmetric)
        return self._lists

    def pair_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x rows, y rows) int64 of offset v."""
        order = self.lists().order
        x_rows, y_rows = self.place_list(v)
        if order is None:
            return x_rows, y_rows
        return order.index_select(0, x_rows), order.index_select(0, y_rows)

    def place_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`pair_list` in places of `lists().order` (rows where there is none)."""
        lists = self.lists()
        mirror = lists.mirrored and v > self.n_offsets - 1 - v
        index = self.n_offsets - 1 - v if mirror else v
        part = slice(lists.starts[index], lists.starts[index + 1])
        pair = lists.in_rows[part], lists.out_rows[part]
        return pair[::-1] if mirror else pair

    def device_pairs(self, target: Target) -> DevicePairs:
        """Pair lists for kernels. Building them from tiles waits for the device once; their order
        does not depend on what else was asked."""
        if self._pairs is None:
            if self._given and self._lists is not None:
                lists = self._lists
                starts = torch.tensor(lists.starts, dtype=torch.int64, device=self.device)
                x_rows, y_rows = lists.rows(slice(None))
                self._pairs = DevicePairs(
                    x_rows.int(), y_rows.int(), starts, lists.mirrored, len(x_rows)
                )
            else:
                self._pairs = self._compact(target)
        return self._pairs

    def _compact(self, target: Target) -> DevicePairs:
        from ...kernels.maps.mask_order import compact_pairs

        ready = [tiles is not None for tiles in self._tiles]
        side = ready.index(True) if any(ready) else 0 if self._known(0) else 1
        n_lists = self.n_offsets // 2 + 1 if self.symmetric else self.n_offsets
        room = None if self.scene is None else n_lists * self.n_rows[side]
        found, rows, starts = compact_pairs(self.tiles(side, target)[0], n_lists, target, room)
        x_rows, y_rows = (found, rows) if side == 0 else (rows, found)
        likely = len(rows) if room is None else room // 3
        return DevicePairs(x_rows, y_rows, starts, self.symmetric, likely)


@dataclasses.dataclass(frozen=True, eq=False)
class KernelMap:
    """A rulebook in one direction: y[r] = sum over offsets v and present x rows of x @ w[v].

    flipped: reads the rulebook's other direction.  x_fold, y_fold: equal coordinates folded on that
    end; the rulebook then speaks of distinct coordinates: x rows are summed into them, y rows
    copied from them. self_offset: for folded submanifold maps, the offset at which every row also
    meets itself, outside the rulebook; there the first of equal x rows stands for all instead of
    their sum.
    """

    rulebook: Rulebook
    flipped: bool = False
    x_fold: Duplicates | None = None
    y_fold: Duplicates | None = None
    self_offset: int = -1

    @property
    def n_offsets(self) -> int:
        return self.rulebook.n_offsets

    @property
    def n_in(self) -> int:
        """Rows of x (before folding)."""
        return (
            self.rulebook.n_rows[0 if self.flipped else 1]
            if self.x_fold is None
            else len(self.x_fold.inverse)
        )

    @property
    def n_out(self) -> int:
        """Rows of y (after unfolding)."""
        return (
            self.rulebook.n_rows[1 if self.flipped else 0]
            if self.y_fold is None
            else len(self.y_fold.inverse)
        )

    @property
    def device(self) -> torch.device:
        return self.rulebook.device

    def transposed(self) -> KernelMap:
        """The same pairs with x and y exchanged: inverse layers, dgrad."""
        if self.self_offset >= 0:  # "the first of equal rows" is said of x only
            from .fold import unfolded

            return unfolded(self).transposed()
        return KernelMap(self.rulebook, not self.flipped, self.y_fold, self.x_fold)

    @property
    def side(self) -> int:
        return int(self.flipped)

    def pair_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x rows, y rows) int64 of offset v, among distinct coordinates."""
        x_rows, y_rows = self.rulebook.pair_list(v)
        return (y_rows, x_rows) if self.flipped else (x_rows, y_rows)

    def place_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in places of the rulebook's order, see `Rulebook.place_list`."""
        x_rows, y_rows = self.rulebook.place_list(v)
        return (y_rows, x_rows) if self.flipped else (x_rows, y_rows)
