"""The launches that build maps on a device: what rows reach is inserted into a hash table,
numbered, perhaps sorted, and linked; or looked up.

One sequence for maps that are built one by one and for those that are queued together: how many
rows there are may stand on the device alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels.runtime.parts import Operand, Part, Slab, allocate_part
from ...kernels.runtime.target import Target
from ..device.kernels import coord_key, hash_table, neighbor_lookup, new_rows, row_ranks
from ..geometry.boxes import Box, KeyLayout
from ..geometry.offsets import Offsets

if TYPE_CHECKING:
    from ...kernels.maps.hash_table import HashTable
    from ...kernels.maps.neighbor_table import NeighborTable


class Source(NamedTuple):
    """coords: int32 [N, 1 + D].  layout: of their keys.  alive: int32 [N], negative for dead rows;
    None where all live.  last: on the device, one less than the rows in use; None where all are."""

    coords: torch.Tensor
    layout: KeyLayout
    alive: torch.Tensor | None = None
    last: Operand | None = None

    @staticmethod
    def of(coords: torch.Tensor, box: Box, alive: torch.Tensor | None = None) -> Source:
        """coords int32 [N, 1 + D] in `box`, all rows of which are in use.  alive: int32 [N], negative for dead rows;
        None where all live."""
        return Source(coords, box.layout(coords.device), alive)


class Expansion:
    """New coordinates (c * multiplier + sign * offset) / divisor that are whole and lie in the
    bounds of `out`, of the coordinates c of `source`, and the tables between both.

    `insert`, `number` and `link` in this order.
    """

    def __init__(
        self,
        source: Source,
        offsets: Offsets,
        multiplier: tuple[int, ...],
        divisor: tuple[int, ...],
        sign: int,
        out: KeyLayout,
        target: Target,
        slab: Slab | None = None,
    ) -> None:
        """slab: for what nobody reads after `link`, `scratch_elements`."""
        self.target, self._slab = target, slab
        coords, layout, alive, last = source
        geometry = offsets.geometry(coords.device, multiplier, divisor, sign)
        wide = layout.wide(offsets, multiplier) or out.wide(offsets, divisor)
        self.reach = coord_key.Reach(coords, geometry, out.bounds, wide, alive, last)
        self.slots: Part | None = allocate_part(slab, coords.device, geometry.n_row_offsets, coords.shape[0])

    def insert(self, table: HashTable) -> None:
        """Fill an empty table with the coordinates; how many there are goes to its counters."""
        assert self.slots is not None
        hash_table.hash_insert(table, self.reach, self.slots, self.target)
        self.table = table
        self._owned = new_rows.count_owners(table, self.slots, self.target, self.reach.last, self._slab)

    def number(self, n_new: int, order: str, counted: bool) -> torch.Tensor:
        """The new coordinates int32 [n_new, 1 + D] in `order`, see `MapRequest`; the table then
        maps to their rows.

        counted: only the table's counter tells how many of these rows are in use.
        """
        assert self.slots is not None
        coords = new_rows.number_new_rows(self.table, self.slots, self._owned, n_new, self.reach, self.target)
        if order == "first_seen" or n_new == 0:
            return coords
        return row_ranks.sort_rows(
            self.table,
            coords,
            self.reach.bounds,
            self.target,
            self.table.total if counted else None,
            self._slab,
            order == "ascending",
        )

    def link(
        self,
        n_new: int,
        count_new: Operand | None = None,
        link: bool = True,
        slabs: tuple[Slab | None, Slab | None] = (None, None),
    ) -> tuple[NeighborTable, NeighborTable | None]:
        """(table of the new rows, table of the old rows if `link`); once. slabs: for both, of
        -1."""
        slots = self.slots
        assert slots is not None
        self.slots = self._slab = None  # may be reused for a table
        del self._owned
        linked, scattered = new_rows.link_new_rows(
            self.table, slots, n_new, self.reach, self.target, count_new, link, slabs
        )
        return scattered, linked


def scratch_elements(n_rows: int, n_row_offsets: int, n_new: int, order: str) -> int:
    """Elements of a slab for what the expansion of `n_rows` rows to `n_new` needs until it is
    linked. order: of the new rows."""
    owned = new_rows.owner_blocks(n_rows, n_row_offsets)
    ranked = 0 if order == "first_seen" else row_ranks.scratch_elements(n_new)
    return Slab.rounded(n_row_offsets * n_rows) + Slab.rounded(owned) + ranked


def sorted_rows(coords: torch.Tensor, box: Box, order: str) -> torch.Tensor:
    """Rows int64 [N] of coordinates in `box` in the order "sorted" or "ascending", see
    `MapRequest`, by torch alone."""
    device, ascending = coords.device, order == "ascending"
    if box.oversized or not (ascending or box.steps):
        rows, columns = torch.arange(coords.shape[0], device=device), range(1, coords.shape[1])
        for column in (*(reversed(columns) if ascending else columns), 0):
            column_values = coords[:, column].index_select(0, rows)
            rows = rows.index_select(0, torch.sort(column_values, stable=True).indices)
        return rows
    if ascending:
        keys = coords[:, 0].long()
        for column, (low, extent) in enumerate(zip(box.lo[1:], box.size[1:], strict=True), 1):
            keys = keys * extent + (coords[:, column] - low)
    else:
        steps = box.layout(device).steps
        assert steps is not None  # where the box has any
        keys = (coords * steps.view()).sum(1)
    return torch.sort(keys, stable=True).indices


def look_up(
    source: Source,
    table: HashTable,
    n_values: int,
    table_layout: KeyLayout,
    offsets: Offsets,
    step: tuple[int, ...],
    target: Target,
    center: int = -1,
    slab: Slab | None = None,
) -> NeighborTable:
    """The neighbour table of the rows of `source` (coordinate * step + offset) among the `n_values`
    coordinates that `table` holds, with keys of `table_layout`.

    center: the offset at which every row meets itself without a search; -1: none.  slab: see
    `neighbor_lookup`.
    """
    (coords, layout, alive, last), ones = source, (1,) * offsets.dimension
    geometry = offsets.geometry(coords.device, step, ones, 1)
    wide = layout.wide(offsets, step) or table_layout.wide(offsets, ones)
    reach = coord_key.Reach(coords, geometry, table_layout.bounds, wide, alive, last)
    return neighbor_lookup.neighbor_lookup(table, n_values, reach, target, center, slab)
