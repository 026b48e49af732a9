"""Which views of a rulebook there are, what they hold, which can be let go of, and how it is built
again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from .derived import Derived, map_bytes

if TYPE_CHECKING:
    from ....kernels.maps.neighbor_table import NeighborTable
    from ....kernels.maps.tile_list import TileList
    from ..pair_lists import DevicePairs, PairLists


class Rebuild(Protocol):
    """Builds a rulebook again, with the same values.

    by_rows: whether parts of the table of side 0 can be had alone.  searching: bytes that `search`
    makes.
    """

    @property
    def by_rows(self) -> bool:
        """Whether `table_of` serves."""

    @property
    def searching(self) -> int:
        """Bytes that `search` makes."""

    def rulebook(self) -> ViewSet:
        """The rulebook, built again."""

    def search(self) -> None:
        """Have what searches for coordinates."""

    def table_of(self, begin: int, end: int) -> torch.Tensor:
        """int32 [V, end - begin], -1 where absent: columns of its table of side 0."""

    def drop(self) -> None:
        """Let go of what searches for coordinates."""


class ViewSet:
    """Of a `Rulebook`, see there for what is common.

    _lists: handed over by the maker (`_from_lists`), or made of a table.  _pairs: for kernels.  rebuild: how it
    is made once more, where that is known; `drop` leaves nothing then.
    """

    n_rows: tuple[int, int]
    n_offsets: int
    symmetric: bool

    def __init__(self, lists: PairLists | None) -> None:
        self._tables: list[NeighborTable | None] = [None, None]
        self._tiles: list[TileList | None] = [None, None]
        self._lists, self._from_lists = lists, lists is not None
        self._pairs: DevicePairs | None = None
        self.rebuild: Rebuild | None = None
        self._dropped = False
        self.cache = Derived()

    def tiled(self, side: int) -> bool:
        """Whether there are tiles of `side`."""
        return self._tiles[side] is not None

    def tabled(self, side: int) -> bool:
        """Whether there is a table of `side`."""
        return self._tables[side] is not None

    def _has_view(self, side: int) -> bool:
        return self._tables[side] is not None or self._tiles[side] is not None

    def drop(self) -> None:
        """Let go of what can be made again, with the same values: what was derived, and all views
        but one, or all of them where `rebuild` builds them."""
        self.cache.drop()
        self._pairs = None
        root = -1 if self.rebuild is not None or self._from_lists else 0 if self._has_view(0) else 1
        if self.rebuild is not None:
            self._dropped = True
            self.rebuild.drop()
        if self.rebuild is not None or not self._from_lists:
            self._lists = None
        for side in (0, 1):
            if side != root:
                self._tables[side] = self._tiles[side] = None
            elif self._tables[side] is not None:
                self._tiles[side] = None

    def keep_table(self, side: int) -> None:
        """Let go of all but the table of `side`, which is there, and its masks, too."""
        table = self._tables[side]
        assert table is not None
        self.cache.drop()
        self._pairs = None
        if not self._from_lists:
            self._lists = None
        self._tables, self._tiles = [None, None], [None, None]
        self._tables[side] = type(table)(table.nbr, None, table.count, table.blank)

    def making(self, side: int) -> int:
        """Bytes that making the table of `side` takes, it included; of one that is not there."""
        n, others, v = self.n_rows[side], self.n_rows[1 - side], self.n_offsets
        if self.tiled(side):
            return 10 * v * n + 32 * n  # see `TileList.table`
        if not (self._dropped or self._has_view(1 - side)):
            return 4 * v * n  # of lists
        if self._dropped:
            return map_bytes(n, 0 if self.symmetric else others, v)
        return 8 * v * (n + 1) + 17 * v * others  # of the other side's table, see `_reversed`

    @property
    def nbytes(self) -> int:
        """Of all views, and of what was derived and tells its size."""
        views = [view.nbytes for view in (*self._tables, *self._tiles) if view is not None]
        lists = [view.nbytes for view in (self._lists, self._pairs) if view is not None]
        derived = [getattr(view, "nbytes", 0) for view in self.cache.values()]
        return sum(views) + sum(lists) + sum(derived)
