"""Coordinate maps: the active coordinates at one tensor stride, with look-up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...errors import DataTypeError, DeviceError, KernelError, OverflowLimitError, ShapeError
from ...kernels.runtime.target import Target
from ..device import stream_order
from ..device.device_support import kernel_target
from ..device.kernels import coord_key, hash_table
from ..device.no_double_backward import refuse_wrapped
from ..geometry.boxes import Box, KeyLayout
from ..geometry.data_bounds import DataBounds
from ..geometry.offsets import Offsets
from ..geometry.sparse_data import brief
from . import host_index, wide_index
from .fold import Duplicates
from .rows import Rows, rows_of

if TYPE_CHECKING:
    from ...kernels.maps.hash_table import HashTable

_MIN_CAPACITY = 64
_MAX_CAPACITY = 1 << 30
MOST_KEYS = _MAX_CAPACITY // 3  # of a hash table
_FETCH_ROWS = 1 << 17  # below, waiting for all queued work costs less than an event


def capacity_for(n_keys: int) -> int:
    """Slots for `n_keys` keys: a power of two, at most a third full. Raises: OverflowLimitError above 2^30 slots."""
    capacity = max(_MIN_CAPACITY, 1 << (3 * n_keys - 1).bit_length())
    if capacity > _MAX_CAPACITY:
        raise OverflowLimitError(
            f"a hash table for {n_keys} coordinates needs {capacity} slots; the limit is "
            f"{_MAX_CAPACITY}. "
            "Split the batch."
        )
    return capacity


@functools.cache
def _origin(dimension: int) -> Offsets:
    return Offsets.of([(0,) * dimension])


class CoordinateMap:
    """Coordinates [N, 1 + D] int32 (batch first) inside a box, with look-up structures built on
    first use.

    Rows outside the box are dead: they keep their place, nothing finds them and they find nothing.
    """

    def __init__(
        self, coords: torch.Tensor, box: Box | DataBounds, rows: Rows | None = None, own: bool = False
    ) -> None:
        """coords: int32 [N, 1 + D]; box: of the same dimension, or the bounds of these coordinates that are still to
        be learnt; rows: those in use, if not all.  own: nobody else has this tensor object, which is contiguous.
        Raises: ShapeError, DataTypeError, DeviceError (meta), OverflowLimitError (2^31 rows or more),
        UnsupportedError in transforms of torch.func."""
        shape, device = coords.shape, coords.device
        if len(shape) != 2 or shape[1] != box.dimension + 1:
            raise ShapeError(
                f"coordinates have shape {list(coords.shape)}; expected [N, {box.dimension + 1}] (batch first)."
            )
        if coords.dtype != torch.int32:
            raise DataTypeError(f"coordinates are {coords.dtype}; expected torch.int32 (use .int()).")
        if device.type == "meta":
            raise DeviceError("coordinates are on the meta device; a map needs their values.")
        if shape[0] >= 1 << 31:
            raise OverflowLimitError(f"{shape[0]} rows; a coordinate map takes fewer than 2^31.")
        # A tensor object of our own: caches keyed by the caller's object must not keep it alive.
        self._coords = coords if own else coords.detach().contiguous()
        refuse_wrapped(self._coords)  # what is made in a transform is wrapped, whatever it is made of
        self._box = box if isinstance(box, Box) else None
        self.data_bounds = None if isinstance(box, Box) else box
        self.loose = False  # may end inside the box, and rules start from where they do
        self.tight: Box | DataBounds | None = None  # exact bounds, where somebody asked for them
        self.rows = rows_of(coords) if rows is None else rows
        self._host: host_index.Indexed | None = None
        self._table: HashTable | None = None
        self._order = stream_order.of(device)  # of coordinates, table and folding
        self._alive: torch.Tensor | None = None
        self._checked = False
        self._unique = True
        self._n_distinct = 0
        self._slots: torch.Tensor | None = None
        self._duplicates: Duplicates | None = None
        self._distinct: CoordinateMap | None = None

    def __repr__(self) -> str:
        where = "bounds of the data" if self.unbounded else self.box
        return f"CoordinateMap({brief(self._coords)}, {where})"

    def _follow(self) -> None:
        """Have the current stream wait for what of this was queued on another one."""
        if self._order is not None:
            self._order.wait(self._tensors)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield self._coords
        table = self._table
        if table is not None:
            yield from (table.keys, table.values, table.flags)
        if self._slots is not None:
            yield self._slots
        if self._duplicates is not None:
            yield from (self._duplicates.first, self._duplicates.inverse)

    def _queued(self) -> None:
        if self._order is not None:
            self._order.queued()

    @property
    def coords(self) -> torch.Tensor:
        """int32 [N, 1 + D]."""
        self._follow()
        return self._coords

    @property
    def box(self) -> Box:
        """What the coordinates may be; waits for the device the first time if that is still to be
        learnt."""
        if self._box is None:
            assert self.data_bounds is not None
            self._box = self.data_bounds.box
        return self._box

    @property
    def bounds(self) -> Box | DataBounds:
        """What rules for outputs start from, which may still have to be learnt: the box, or exact
        bounds where the coordinates are `loose`."""
        if not self.loose or self.n_rows == 0:
            return self.data_bounds or self.box
        if self.tight is None:
            self.tight = DataBounds(self.coords)
        return self.tight

    @property
    def extent(self) -> Box:
        """The same; waits for the device the first time, unless it is known."""
        bounds = self.bounds
        return bounds.box if isinstance(bounds, DataBounds) else bounds

    @property
    def unbounded(self) -> bool:
        """Whether the box is still to be learnt."""
        return self._box is None and (self.data_bounds is None or self.data_bounds.cached_box is None)

    @property
    def n_rows(self) -> int:
        """Rows that there is room for, dead ones included; see `rows` for those in use."""
        return self._coords.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the coordinates are."""
        return self._coords.device

    @property
    def alive(self) -> torch.Tensor | None:
        """int32 [N], negative for dead rows; None when every row is live."""
        self._check()
        return self._alive

    @property
    def unique(self) -> bool:
        """No two live rows share a coordinate. Waits for the device the first time, for coordinates
        of the user."""
        self._check()
        return self._unique

    @property
    def checked(self) -> bool:
        """Whether `alive` and `unique` are known without waiting for the device."""
        return self._checked

    def _check(self) -> None:
        if not self._checked:
            self.rows.require_host_count("looking for equal rows")
            target = self.kernel_target()
            if target is None:
                indexed = self.indexed()
                self._alive, self._unique, self._checked = indexed.alive, indexed.unique, True
            else:
                self.table(target)
                self._read_counters()

    def kernel_target(self, key64: bool = False, expands: bool = False) -> Target | None:
        """The target whose kernels search this map (key64: and another one with 64-bit keys;
        expands: and make that one's coordinates); None where plain torch does."""
        if self.n_rows == 0 or self.box.oversized:
            return None
        return kernel_target(self.device, key64 or self.box.key64, expands)

    def adopt(self, table: HashTable | None = None) -> None:
        """Take over a hash table from whoever made these coordinates, which are distinct and live
        by construction."""
        self._table, self._checked = table, True

    @property
    def distinct(self) -> bool:
        """Whether it is known that all rows live, and that no two are equal."""
        return self._checked and self._unique and self._alive is None

    @property
    def tabled(self) -> bool:
        """Whether there is a table already."""
        return self._table is not None

    def drop_table(self) -> None:
        """Forget the table: it was filled by bounds which did not hold, or takes memory."""
        self._table = self._slots = None

    def indexed(self) -> host_index.Indexed:
        """The rows as the host sees them; their index is made when it is asked for."""
        if self._host is None:
            search = wide_index if self.box.oversized else host_index
            index = search.Indexed(self.coords, self.box)
            if self._order is not None:
                _ = index.index  # tensors on streams are made once, for all to wait for
            self._queued()
            self._host = index
        self._follow()
        return self._host

    def host(self) -> host_index.HostIndex:
        """The sorted index in plain torch or numpy."""
        return self.indexed().index

    def table(self, target: Target, layout: KeyLayout | None = None) -> HashTable:
        """The hash table for kernels; its values decode to rows of this map. Does not wait for the
        device. layout: where bounds are read, if not those of the box."""
        table = self._table
        self._follow()
        if table is None:
            table = self._insert(target, layout or self.box.layout(self.device))
            self._queued()
            self._table = table
        return table

    def _insert(self, target: Target, layout: KeyLayout) -> HashTable:
        coords, device = self._coords, self._coords.device
        n_rows, ones = coords.shape[0], (1,) * (coords.shape[1] - 1)
        geometry = _origin(len(ones)).geometry(device, ones, ones, 1)
        table = hash_table.HashTable.allocate(capacity_for(n_rows), layout.key64, device)
        slots = coords.new_empty(n_rows)
        reach = coord_key.Reach(coords, geometry, layout.bounds, False, None, self.rows.device)
        hash_table.hash_insert(table, reach, slots, target)
        if not self._checked:
            self._slots = slots
            if n_rows >= _FETCH_ROWS:
                table.fetch()
        return table

    def _read_counters(self) -> None:
        assert self._table is not None
        self.validate(*self._table.counters())

    def validate(self, inserted: int, n_live: int, overflow: bool) -> None:
        """Learn from the table's counters whether rows are distinct and live. Raises: KernelError where probes ran
        out."""
        if overflow:
            raise KernelError(
                f"the hash table ran out of probes for {self.n_rows} coordinates; please report "
                "the coordinates that "
                "caused it."
            )
        self._alive = None if n_live == self.n_rows else self._slots
        self._unique, self._checked, self._n_distinct = inserted == n_live, True, inserted
        if self._unique:
            self._slots = None

    def duplicates(self) -> Duplicates:
        """The folding of equal coordinates (for maps that are not `unique`)."""
        self._follow()
        if self._duplicates is None:
            duplicates = None if self._slots is None else self._fold_table(self._slots)
            duplicates = duplicates or self._fold_host()
            self._queued()
            self._duplicates = duplicates
        return self._duplicates

    def distinct_map(self) -> CoordinateMap:
        """Every live coordinate once, by its first row; this map itself where it is `unique`."""
        if self.unique:
            return self
        self.duplicates()
        assert self._distinct is not None
        return self._distinct

    def _fold_host(self) -> Duplicates:
        """The folding, from the sorted index: distinct coordinates in order of their first row."""
        index = self.host()
        order = torch.argsort(index.rows)
        number = torch.empty_like(order)
        number[order] = torch.arange(order.shape[0], device=self.device)
        first = index.rows.index_select(0, order)
        assert self._host is not None
        rank = self._host.inverse
        inverse = torch.full_like(rank, first.shape[0])
        live = rank >= 0
        inverse[live] = number[rank[live]]
        folded = CoordinateMap(self.coords.index_select(0, first), self.box)
        folded.adopt()
        self._distinct = folded
        return Duplicates(first, inverse)

    def _fold_table(self, slots: torch.Tensor) -> Duplicates:
        """The folding, read from the hash table: every slot holds the first row of its key."""
        table = self._table
        assert table is not None
        live = slots >= 0
        leader = self.n_rows - 1 - table.values.index_select(0, slots.clamp(min=0)).long()
        rows = torch.arange(self.n_rows, device=self.device)
        leads = live & (leader == rows)
        number = leads.cumsum(0) - 1
        # How many lead is known: rows that do not all go to one place more, and nobody waits.
        first = torch.empty(self._n_distinct + 1, dtype=torch.int64, device=self.device)
        first.scatter_(0, torch.where(leads, number, self._n_distinct), rows)
        first = first[:-1].clone()
        inverse = torch.where(live, number.index_select(0, torch.where(live, leader, 0)), len(first))
        folded = CoordinateMap(self.coords.index_select(0, first), self.box)
        values = torch.full_like(table.values, -1)
        values[slots.index_select(0, first)] = -2 - rows[: len(first)].to(values.dtype)
        keys, _, flags = table.own
        folded.adopt(hash_table.HashTable(keys, values, flags, table.capacity, False))
        self._slots, self._distinct = None, folded
        return Duplicates(first, inverse)
