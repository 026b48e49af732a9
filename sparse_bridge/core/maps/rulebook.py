"""Rulebooks: which input row meets which output row at which kernel offset.

A `Rulebook` is immutable geometry with lazily built views: a neighbour table and mask-ordered tiles
for each direction, pair lists per offset.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ...kernels.runtime.target import Target
from ..device import stream_order
from .pair_lists import DevicePairs, PairLists
from .rows import Rows

if TYPE_CHECKING:
    from ...kernels.maps.neighbor_table import NeighborTable
    from ...kernels.maps.pair_batch import PairBatch
    from ...kernels.maps.tile_list import TileList
    from .repeated import Backward


def map_bytes(n_rows: int, new: int, n_offsets: int) -> int:
    """Bytes that building a map on a device takes, at most: a table with masks, and a hash table a
    sixth full; of `new` rows that come with it the same, and a slot for whatever reaches them."""
    per_row = 4 * (n_offsets - (-n_offsets // 32)) + 6 * 12
    return (n_rows + new) * per_row + (4 * n_offsets * n_rows if new else 0)


class Observer(Protocol):
    """Who wants to know which views of a rulebook are asked for."""

    def wanted(self, side: int, tiles: bool) -> None:
        """A view of `side` was asked for; tiles: as mask-ordered tiles."""

    def listed(self) -> None:
        """Pair lists were asked for, on the device."""


class Again(Protocol):
    """How a rulebook can be made once more, with the same values.

    by_rows: whether parts of the table of side 0 can be had alone.  searching: bytes that `search`
    makes.
    """

    @property
    def by_rows(self) -> bool: ...

    @property
    def searching(self) -> int: ...

    def whole(self) -> Rulebook:
        """The rulebook."""

    def search(self) -> None:
        """Have what searches for coordinates."""

    def table_of(self, begin: int, end: int) -> torch.Tensor:
        """Columns of its table of side 0."""

    def drop(self) -> None:
        """Let go of what searches for coordinates."""


class Derived:
    """What upper layers derived from a rulebook (plans, chunks), which lives as long as it does.

    get: the object under a key, or None.
    """

    __slots__ = ("_held", "get")

    def __init__(self) -> None:
        self._held: dict[Any, Any] = {}
        self.get = self._held.get  # the dictionary's own: it is asked in every layer call

    def put(self, key: Any, made: Any) -> Any:
        self._held[key] = made
        return made

    def __len__(self) -> int:
        return len(self._held)

    def values(self) -> list[Any]:
        return list(self._held.values())

    def drop(self) -> None:
        """Forget all of it: it is derived again when it is asked for."""
        self._held.clear()


class Rulebook:
    """Pairs (x row, y row) of V offsets. Side 0 gathers x rows for every y row, side 1 y rows for
    every x row.

    x, y: the rows of both ends.  symmetric: submanifold; x and y rows are the same rows, and side 1
    is side 0 with its offsets reversed.  regular: an offset meets each row at most once, so tables
    can hold it; None (pair lists of the user) to look when asked.  backward: where gradients go, if
    that is true of the rows of side 0 alone.  views: table or tiles of each
    side, perhaps with columns that are not in use.

    order: the stream that views of it were queued on; None where there are no streams.  again:
    builds the same once more, where that is known; `drop` leaves nothing then.
    """

    def __init__(
        self, x: Rows | int, y: Rows | int, n_offsets: int, device: torch.device, *,
        symmetric: bool = False, center: int = -1, lists: PairLists | None = None,
        regular: bool | None = True,
        views: Sequence[NeighborTable | TileList | None] = (None, None),
    ) -> None:  # fmt: skip
        x = Rows.of(x) if isinstance(x, int) else x
        y = Rows.of(y) if isinstance(y, int) else y
        self.rows, self.n_rows = (y, x), (y.capacity, x.capacity)
        self.n_offsets, self.device = n_offsets, device
        self.symmetric, self.center = symmetric, center
        self._tables: list[NeighborTable | None] = [None, None]
        self._tiles: list[TileList | None] = [None, None]
        self._lists, self._given = lists, lists is not None
        self._pairs: DevicePairs | None = None
        self._coming: tuple[PairBatch, int, int] | None = None  # where pair lists are counted
        if regular is not None:
            self.regular = regular
        self._observer: Observer | None = None
        self.order = stream_order.of(device)
        self.backward: Backward | None = None
        self.trained = False  # whether a convolution over it has recorded gradients
        self.again: Again | None = None
        self._dropped = False
        self.cache = Derived()
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
        views = [None if self._given else self.table(0)[0], None]
        if not (self._given or self.symmetric):
            views[1] = self.table(1)[0]
        made = Rulebook(
            self.rows[1], self.rows[0], self.n_offsets, self.device, symmetric=self.symmetric,
            center=self.center, lists=self._lists if self._given else None, regular=self.regular,
            views=views,
        )  # fmt: skip
        made.trained, made.backward = self.trained, self.backward
        return made

    def as_lists(self) -> Rulebook:
        """The same pairs, which no table of side 1 could hold."""
        made: Rulebook | None = self.cache.get("as lists")
        if made is None:
            lists = self.lists()
            made = Rulebook(
                self.rows[1], self.rows[0], self.n_offsets, self.device, lists=lists, regular=False
            )
            self.cache.put("as lists", made)
        return made

    def observe(self, observer: Observer) -> None:
        """Have `observer` hear which views are asked for from now on."""
        self._observer = observer

    def follow(self) -> None:
        """Have the current stream wait for what of this was queued on another one. Whoever asks for
        a view comes by here, so it is built again here, too."""
        if self._dropped and self.again is not None:
            made, self._dropped = self.again.whole(), False
            self._tables, self._tiles, self._lists = made._tables, made._tiles, made._lists
            self._given = made._given
            self._queued()
        if self.order is not None:
            self.order.wait(self._held)

    def _held(self) -> Iterator[torch.Tensor]:
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

    def drop(self) -> None:
        """Let go of what can be made again, with the same values: what was derived, and all views
        but one, or all of them where `again` builds them."""
        self.cache.drop()
        self._pairs = self._coming = None
        root = -1 if self.again is not None or self._given else 0 if self._known(0) else 1
        if self.again is not None:
            self._dropped = True
            self.again.drop()
        if self.again is not None or not self._given:
            self._lists = None
        for side in (0, 1):
            if side != root:
                self._tables[side] = self._tiles[side] = None
            elif self._tables[side] is not None:
                self._tiles[side] = None

    def keep_table(self, side: int) -> None:
        """Let go of all but the table of `side`, which is there, and its masks, too."""
        found = self._tables[side]
        assert found is not None
        self.cache.drop()
        self._pairs = self._coming = None
        if not self._given:
            self._lists = None
        self._tables, self._tiles = [None, None], [None, None]
        self._tables[side] = type(found)(found.nbr, None, found.count, found.blank)

    def tabled(self, side: int) -> bool:
        """Whether there is a table of `side`."""
        return self._tables[side] is not None

    def making(self, side: int) -> int:
        """Bytes that making the table of `side` takes, it included; of one that is not there."""
        n, others, v = self.n_rows[side], self.n_rows[1 - side], self.n_offsets
        if self.tiled(side) or not (self._dropped or self._known(1 - side)):
            return 4 * v * n  # of the tiles, or of lists
        if self._dropped:
            return map_bytes(n, 0 if self.symmetric else others, v)
        return 8 * v * (n + 1) + 17 * v * others  # of the other side's table, see `_reversed`

    @property
    def nbytes(self) -> int:
        """Of all views, and of what was derived and tells its size."""
        views = [one.nbytes for one in (*self._tables, *self._tiles) if one is not None]
        lists = [one.nbytes for one in (self._lists, self._pairs) if one is not None]
        derived = [getattr(one, "nbytes", 0) for one in self.cache.values()]
        return sum(views) + sum(lists) + sum(derived)

    def tiled(self, side: int) -> bool:
        """Whether there are tiles of `side`."""
        return self._tiles[side] is not None

    @functools.cached_property  # plain to read afterwards: every layer call asks
    def regular(self) -> bool:
        lists = self.lists()
        lengths = torch.tensor(lists.starts, device=self.device).diff()
        v = torch.arange(self.n_offsets, device=self.device).repeat_interleave(lengths)
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
        found = self._tables[side]
        if self._observer is not None:
            self._observer.wanted(side, False)
        if found is None:
            tiles = self._tiles[side]
            found = self._made(side) if tiles is None else tiles.table()
            self._tables[side] = found
            self._queued()
        elif found.count is not None:
            found = self._tables[side] = found.used(self.n_rows[side])
            self._queued()
        return found, False

    def neighbors(self, side: int) -> tuple[torch.Tensor, bool]:
        """The same without masks; rows lie side by side, and offsets as far apart as the memory for
        a table has them. Nothing is copied of tables that have room for more rows."""
        if side == 1 and self.symmetric:
            return self.neighbors(0)[0], True
        found, n_rows = self._tables[side], self.n_rows[side]
        if found is None or found.count is None or found.n_rows <= n_rows:
            table, reverse = self.table(side)
            return table.nbr, reverse
        self.follow()
        if self._observer is not None:
            self._observer.wanted(side, False)
        return found.nbr[:, :n_rows], False

    def _made(self, side: int) -> NeighborTable:
        """A table that nobody left: of the pair lists, or of the other side's."""
        return self._reversed(side) if self._known(1 - side) else self._scatter(side)

    def _reversed(self, side: int) -> NeighborTable:
        """The table of `side` from that of the other one, without waiting for the device."""
        from ...kernels.maps.neighbor_table import NeighborTable

        nbr, n_rows = self.table(1 - side)[0].nbr, self.n_rows[side]
        rows = torch.arange(nbr.shape[1], dtype=torch.int32, device=self.device)
        made = nbr.new_full(
            (self.n_offsets, n_rows + 1), -1
        )  # the last column takes what is absent
        made.scatter_(1, torch.where(nbr >= 0, nbr, n_rows).long(), rows.expand_as(nbr))
        return NeighborTable(made[:, :n_rows].contiguous())

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
        self.follow()
        found = self._tiles[side]
        if self._observer is not None:
            self._observer.wanted(side, True)
        if found is None:
            from ...kernels.maps.mask_order import mask_order, pack_tiles

            table = self._tables[side] or self.table(side)[0]
            found = pack_tiles(table, mask_order(table, target), target)
            found.n_rows = self.n_rows[side]
            self._tiles[side] = found
            self._tables[side] = None  # the tiles hold it all, in another order
            self._queued()
        return found, reverse

    @property
    def n_lists(self) -> int:
        """Pair lists that tell all: of half of the offsets where the others are their mirrors."""
        return self.n_offsets // 2 + 1 if self.symmetric else self.n_offsets

    def _known(self, side: int) -> bool:
        return self._tables[side] is not None or self._tiles[side] is not None

    def lists(self) -> PairLists:
        """Pair lists with host starts; waits for the device where only tables exist."""
        self.follow()
        if self._lists is None:
            side = 0 if self._known(0) else 1
            self.rows[side].number("A list of pairs")
            table = self.table(side)[0]
            n_lists = self.n_lists
            present = table.nbr[:n_lists] >= 0
            rows = present.nonzero()[:, 1]
            found = table.nbr[:n_lists][present].long()
            x_rows, y_rows = (found, rows) if side == 0 else (rows, found)
            starts = [0, *present.sum(1).cumsum(0).tolist()]
            self._lists = PairLists(x_rows, y_rows, starts, self.symmetric)
            self._queued()
        return self._lists

    def pair_list(self, v: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(x rows, y rows) int64 of offset v."""
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
            self._observer.listed()
        if self._pairs is None:
            if self._given and self._lists is not None:
                lists = self._lists
                starts = torch.tensor(lists.starts, dtype=torch.int64, device=self.device)
                x_rows, y_rows = lists.in_rows, lists.out_rows
                longest = max(b - a for a, b in itertools.pairwise(lists.starts))
                self._pairs = DevicePairs(
                    x_rows.int(), y_rows.int(), starts, lists.mirrored, len(x_rows), longest
                )
            else:
                self._pairs = self._compact(target)
            self._queued()
        return self._pairs

    def pairs_are(self, pairs: DevicePairs) -> None:
        """Take pair lists over that agree with the views."""
        self._pairs = pairs

    def _compact(self, target: Target) -> DevicePairs:
        from ...kernels.maps.mask_order import compact_pairs

        side = self._listed_side()
        tiles = self.tiles(side, target)[0]
        coming, self._coming = self._coming, None
        lists = None if coming is None or coming[2] != side else coming[0].take(coming[1])
        room = None if self.rows[side].device is None else self.n_lists * self.n_rows[side]
        if lists is None:
            lists = compact_pairs(tiles, self.n_lists, target, room)
        found, rows, starts = lists
        x_rows, y_rows = (found, rows) if side == 0 else (rows, found)
        likely = len(rows) if room is None else room // 3
        return DevicePairs(x_rows, y_rows, starts, self.symmetric, likely)

    def _listed_side(self) -> int:
        """The side whose tiles pairs are listed from."""
        ready = [tiles is not None for tiles in self._tiles]
        return ready.index(True) if any(ready) else 0 if self._known(0) else 1

    def countable(self) -> tuple[TileList, int] | None:
        """The tiles that pairs are listed from and their side; None where there are none, or none
        with rows."""
        side = self._listed_side()
        tiles = self._tiles[side]
        return (tiles, side) if tiles is not None and tiles.n_pairs > 0 else None

    def expect(self, batch: PairBatch, place: int, side: int) -> None:
        """Have the pair lists come from a batch, whose tiles at `place` are those of `side`."""
        self._coming = batch, place, side
