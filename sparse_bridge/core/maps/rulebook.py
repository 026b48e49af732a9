"""Rulebooks: which input row meets which output row at which kernel offset.

A `Rulebook` is immutable geometry with lazily built views: a neighbour table and mask-ordered tiles
for each direction, pair lists per offset.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ...kernels.runtime.target import Target
from ..device import stream_order
from .fold import Backward
from .pair_lists import DevicePairs, PairLists
from .rows import Rows
from .views.derived import Observer
from .views.view_set import ViewSet

if TYPE_CHECKING:
    from ...kernels.maps.neighbor_table import NeighborTable
    from ...kernels.maps.pair_batch import ListsInTurn, PairBatch
    from ...kernels.maps.tile_list import TileList


class Rulebook(ViewSet):
    """Pairs (x row, y row) of V offsets. Side 0 gathers x rows for every y row, side 1 y rows for
    every x row.

    x, y: the rows of both ends.  symmetric: submanifold; x and y rows are the same rows, and side 1
    is side 0 with its offsets reversed.  regular: an offset meets each row at most once, so tables
    can hold it; None (pair lists of the user) to look when asked.  backward: where gradients go, if
    that is true of the rows of side 0 alone.  views: table or tiles of each
    side, perhaps with columns that are not in use.

    order: the stream that views of it were queued on; None where there are no streams.
    """

    def __init__(
        self,
        x: Rows | int,
        y: Rows | int,
        n_offsets: int,
        device: torch.device,
        *,
        symmetric: bool = False,
        center: int = -1,
        lists: PairLists | None = None,
        regular: bool | None = True,
        views: Sequence[NeighborTable | TileList | None] = (None, None),
    ) -> None:
        super().__init__(lists)
        x = Rows.of(x) if isinstance(x, int) else x
        y = Rows.of(y) if isinstance(y, int) else y
        self.rows, self.n_rows = (y, x), (y.capacity, x.capacity)
        self.n_offsets, self.device = n_offsets, device
        self.symmetric, self.center = symmetric, center
        self._coming: tuple[PairBatch | ListsInTurn, int, int] | None = None  # where pair lists are counted
        if regular is not None:
            self.regular = regular
        self._observer: Observer | None = None
        self.order = stream_order.of(device)
        self.backward: Backward | None = None
        self.keeps_tables = False  # beside tiles of them
        self.trained = False  # whether a convolution over it has recorded gradients
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

    def copied(self) -> Rulebook:
        """The same map with its tables, or the pair lists that it was given, and nothing made of
        them."""
        self.follow()
        views = [None if self._from_lists else self.table(0)[0], None]
        if not (self._from_lists or self.symmetric or self.backward):
            views[1] = self.table(1)[0]
        copy = Rulebook(
            self.rows[1],
            self.rows[0],
            self.n_offsets,
            self.device,
            symmetric=self.symmetric,
            center=self.center,
            lists=self._lists if self._from_lists else None,
            regular=self.regular,
            views=views,
        )
        copy.trained, copy.backward = self.trained, self.backward
        return copy

    def as_lists(self) -> Rulebook:
        """The same pairs, which no table of side 1 could hold."""
        on_pairs: Rulebook | None = self.cache.get("as lists")
        if on_pairs is None:
            lists = self.lists()
            on_pairs = Rulebook(self.rows[1], self.rows[0], self.n_offsets, self.device, lists=lists, regular=False)
            self.cache.put("as lists", on_pairs)
        return on_pairs

    def observe(self, observer: Observer | None) -> None:
        """Have `observer`, or nobody, hear which views are requested from now on."""
        self._observer = observer

    def follow(self) -> None:
        """Have the current stream wait for what of this was queued on another one. Whoever asks for
        a view comes by here, so it is built again here, too."""
        if self._dropped and self.rebuild is not None:
            rebuilt, self._dropped = self.rebuild.rulebook(), False
            self._tables, self._tiles, self._lists = rebuilt._tables, rebuilt._tiles, rebuilt._lists
            self._from_lists = rebuilt._from_lists
            self._queued()
        if self.order is not None:
            self.order.wait(self._tensors)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for view in (*self._tables, *self._tiles):
            if view is not None:
                yield from view.parts
        for lists in (self._lists, self._pairs):
            if lists is not None:
                yield from (lists.in_rows, lists.out_rows)
        if self._pairs is not None:
            yield self._pairs.starts

    def _queued(self) -> None:
        if self.order is not None:
            self.order.queued()

    @functools.cached_property  # plain to read afterwards: every layer call asks
    def regular(self) -> bool:
        """Whether an offset meets each row at most once. Where whoever made the rulebook did not
        say, all pairs are looked at, which waits for the device."""
        lists = self.lists()
        v = self._offsets_of(lists)
        return all(
            torch.unique(v * n + rows).shape[0] == rows.shape[0]
            for rows, n in ((lists.in_rows, self.n_rows[1]), (lists.out_rows, self.n_rows[0]))
        )

    def table(self, side: int) -> tuple[NeighborTable, bool]:
        """(neighbour table [V, n_rows[side]], whether its offsets run backwards)."""
        if side == 1 and self.symmetric:
            return self.table(0)[0], True
        assert not (side and self.backward), "only `as_lists` holds what its rows meet"
        self.follow()
        table = self._tables[side]
        if self._observer is not None:
            self._observer.on_view(side, False)
        if table is None:
            tiles = self._tiles[side]
            table = self._derived_table(side) if tiles is None else tiles.table()
            self._tables[side] = table
            self._queued()
        elif table.count is not None:
            table = self._tables[side] = table.used(self.n_rows[side])
            self._queued()
        return table, False

    def neighbors(self, side: int) -> tuple[torch.Tensor, bool]:
        """(int32 [V, n_rows[side]], -1 where absent; whether its offsets run backwards). Rows lie side by side,
        offsets as far apart as the memory for a table has them. Nothing is copied of tables that have room for more
        rows. Twin in C: `read_table`."""
        if side == 1 and self.symmetric:
            return self.neighbors(0)[0], True
        cached, n_rows = self._tables[side], self.n_rows[side]
        if cached is None or cached.count is None or cached.n_rows <= n_rows:
            table, reverse = self.table(side)
            return table.nbr, reverse
        self.follow()
        if self._observer is not None:
            self._observer.on_view(side, False)
        return cached.nbr[:, :n_rows], False

    def _derived_table(self, side: int) -> NeighborTable:
        """The table of `side` from that of the other side, or else from the pair lists."""
        return self._reversed(side) if self._has_view(1 - side) else self._scatter(side)

    def _reversed(self, side: int) -> NeighborTable:
        """The table of `side` from that of the other one, without waiting for the device."""
        from ...kernels.maps.neighbor_table import NeighborTable

        nbr, n_rows = self.table(1 - side)[0].nbr, self.n_rows[side]
        rows = torch.arange(nbr.shape[1], dtype=torch.int32, device=self.device)
        reversed_nbr = nbr.new_full((self.n_offsets, n_rows + 1), -1)  # the last column takes what is absent
        reversed_nbr.scatter_(1, torch.where(nbr >= 0, nbr, n_rows).long(), rows.expand_as(nbr))
        return NeighborTable(reversed_nbr[:, :n_rows].contiguous())

    def _scatter(self, side: int) -> NeighborTable:
        from ...kernels.maps.neighbor_table import NeighborTable

        lists, n_rows = self.lists(), self.n_rows[side]
        nbr = torch.full((self.n_offsets, n_rows), -1, dtype=torch.int32, device=self.device)
        own, others = (lists.out_rows, lists.in_rows)[:: -1 if side else 1]
        offsets = self._offsets_of(lists)
        nbr.view(-1).index_copy_(0, offsets * n_rows + own, others.int())
        if lists.mirrored:
            nbr.view(-1).index_copy_(0, (self.n_offsets - 1 - offsets) * n_rows + others, own.int())
        return NeighborTable(nbr)

    def _offsets_of(self, lists: PairLists) -> torch.Tensor:
        """int64 [P]: the offset of each pair."""
        lengths = torch.tensor(lists.starts, device=self.device).diff()
        offsets = torch.arange(len(lengths), device=self.device)
        return offsets.repeat_interleave(lengths, output_size=lists.starts[-1])

    def tiles(self, side: int, target: Target) -> tuple[TileList, bool]:
        """(mask-ordered tiles of `side`, whether their offsets run backwards)."""
        reverse = side == 1 and self.symmetric
        side = 0 if reverse else side
        self.follow()
        tiles = self._tiles[side]
        if self._observer is not None:
            self._observer.on_view(side, True)
        if tiles is None:
            from ...kernels.maps.mask_order import mask_order
            from ...kernels.maps.tile_packing import pack_tiles

            table = self._tables[side] or self.table(side)[0]
            tiles = pack_tiles(table, mask_order(table, target), target)
            tiles.n_rows = self.n_rows[side]
            self._tiles[side] = tiles
            if not self.keeps_tables:
                self._tables[side] = None  # the tiles hold it all, in another order
            self._queued()
        return tiles, reverse

    @property
    def n_lists(self) -> int:
        """Pair lists that tell all: of half of the offsets where the others are their mirrors."""
        return self.n_offsets // 2 + 1 if self.symmetric else self.n_offsets

    def lists(self) -> PairLists:
        """Pair lists with host starts; waits for the device where only tables exist. Raises: Refusal where only the
        device knows how many rows there are."""
        self.follow()
        lists = self._lists  # another thread may drop them
        if lists is None:
            side = 0 if self._has_view(0) else 1
            self.rows[side].require_host_count("a list of pairs")
            table = self.table(side)[0]
            n_lists = self.n_lists
            present = table.nbr[:n_lists] >= 0
            rows = present.nonzero()[:, 1]
            others = table.nbr[:n_lists][present].long()
            x_rows, y_rows = (others, rows) if side == 0 else (rows, others)
            starts = [0, *present.sum(1).cumsum(0).tolist()]
            self._lists = lists = PairLists(x_rows, y_rows, starts, self.symmetric)
            self._queued()
        return lists

    def pair_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x rows, y rows) of offset v, each [P], int64; int32 where whoever made the map gave such lists. Waits for
        the device where only tables exist. Raises: Refusal where only the device knows how many rows there are."""
        lists = self.lists()
        mirror = lists.mirrored and v > self.n_offsets - 1 - v
        index = self.n_offsets - 1 - v if mirror else v
        part = slice(lists.starts[index], lists.starts[index + 1])
        pair = lists.in_rows[part], lists.out_rows[part]
        return pair[::-1] if mirror else pair

    def device_pairs(self, target: Target) -> DevicePairs:
        """Pair lists for kernels. Building them from tiles waits for the device once, unless they
        are expected; their order does not depend on what else was asked."""
        self.follow()
        if self._observer is not None:
            self._observer.on_pairs()
        pairs = self._pairs
        if pairs is None:
            if self._from_lists and self._lists is not None:
                lists = self._lists
                starts = torch.tensor(lists.starts, dtype=torch.int64, device=self.device)
                x_rows, y_rows = lists.in_rows, lists.out_rows
                longest = max(b - a for a, b in itertools.pairwise(lists.starts))
                pairs = DevicePairs(x_rows.int(), y_rows.int(), starts, lists.mirrored, len(x_rows), longest)
            else:
                pairs = self._compact(target)
            if pairs.lasting:
                self._pairs = pairs
            self._queued()
        return pairs

    def pairs_are(self, pairs: DevicePairs) -> None:
        """Take pair lists over that agree with the views."""
        self._pairs = pairs

    def _compact(self, target: Target) -> DevicePairs:
        from ...kernels.maps.tile_packing import compact_pairs

        side = self._listed_side()
        tiles = self.tiles(side, target)[0]
        coming, self._coming = self._coming, None
        lists, lasting = None, True
        if coming is not None and coming[2] == side:
            lists, lasting = coming[0].take(coming[1]), coming[0].lasting
        if lists is None:
            room = None if self.rows[side].device is None else self.n_lists * self.n_rows[side]
            lists = compact_pairs(tiles, self.n_lists, target, room)
        if not lasting:
            self._coming = coming
        others, rows, starts = lists
        x_rows, y_rows = (others, rows) if side == 0 else (rows, others)
        likely = len(rows) if self.rows[side].device is None else len(rows) // 3
        return DevicePairs(x_rows, y_rows, starts, self.symmetric, likely, lasting=lasting)

    def _listed_side(self) -> int:
        """The side whose tiles pairs are listed from."""
        tiled = [tiles is not None for tiles in self._tiles]
        return tiled.index(True) if any(tiled) else 0 if self._has_view(0) else 1

    def countable(self) -> tuple[TileList, int] | None:
        """The tiles that pairs are listed from and their side; None where there are none, or none
        with rows."""
        side = self._listed_side()
        tiles = self._tiles[side]
        return (tiles, side) if tiles is not None and tiles.n_pairs > 0 else None

    def expect(self, batch: PairBatch | ListsInTurn, index: int, side: int) -> None:
        """Have the pair lists come from a batch, whose tiles at `index` are those of `side`."""
        self._coming = batch, index, side
