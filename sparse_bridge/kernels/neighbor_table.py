"""Neighbour tables: for every offset and output row the input row, or -1.

`nbr` is int32 `[V, N]`, offset-major. Beside it builders leave what the row order needs: `mask`
int32 `[W, N]`, bit v % 32 of word v // 32 = offset v present, W = ceil(V / 32).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from .coord_key import coordinate, live_rows, locate
from .hash_table import FLAGS, MAX_PROBES, HashTable, hash_find
from .launch import cdiv, register
from .target import Target

OFFSETS = 32  # offsets per program: one mask word
ROWS = 32  # rows per program


@triton.jit
def _store_mask(value, mask_ptr, n_rows, ROWS: tl.constexpr):
    """The mask words of ROWS rows from a [32, ROWS] block of table entries."""
    bit = tl.arange(0, 32)[:, None]
    word = tl.sum((value >= 0).to(tl.int32) << bit, 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(mask_ptr + tl.program_id(1).to(tl.int64) * n_rows + row, word, mask=row < n_rows)


@triton.jit(
    do_not_specialize=["n_rows", "n_values", "n_offsets", "capacity", "max_probes", "center"]
)
def _neighbor_lookup(
    coords_ptr, geometry_ptr, bounds_ptr, alive_ptr, count_ptr, keys_ptr, values_ptr, nbr_ptr,
    mask_ptr, n_rows, n_values, n_offsets, capacity, max_probes, center, HAS_ALIVE: tl.constexpr,
    COUNTED: tl.constexpr, REVERSED: tl.constexpr, D: tl.constexpr, KEY64: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Look up what ROWS rows reach by 32 offsets. Offset `center` (-1: none) is every row itself,
    found or not."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < live_rows(count_ptr, n_rows, COUNTED)) & (v < n_offsets)
    ok = inside
    if HAS_ALIVE:
        ok = ok & (tl.load(alive_ptr + row, mask=row < n_rows, other=-1) >= 0)
    key, ok = locate(
        coords_ptr, geometry_ptr, bounds_ptr, row, tl.minimum(v, n_offsets - 1), ok, D, KEY64, WIDE
    )
    slot = hash_find(keys_ptr, key, ok, capacity, max_probes, KEY64)
    value = tl.load(values_ptr + slot, mask=slot >= 0, other=-1)
    if REVERSED:
        value = tl.where(slot >= 0, n_values - 1 - value, -1)
    value = tl.where(inside & (v == center), row, value)
    tl.store(nbr_ptr + v.to(tl.int64) * n_rows + row, value, mask=inside)
    _store_mask(value, mask_ptr, n_rows, ROWS)


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _table_masks(nbr_ptr, mask_ptr, n_rows, n_offsets):
    """Masks of an existing table."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < n_rows) & (v < n_offsets)
    value = tl.load(nbr_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    _store_mask(value, mask_ptr, n_rows, 32)


@triton.jit
def _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets):
    """(slot, whether `row` is the smallest one that reaches it), [OFFSETS, rows]."""
    inside = (row < live) & (v < n_offsets)
    slot = tl.load(slots_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    value = tl.load(values_ptr + slot, mask=slot >= 0, other=-1)
    return slot, (slot >= 0) & (value == n_rows - 1 - row)


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _count_owned(
    slots_ptr, values_ptr, count_ptr, owned_ptr, flags_ptr, n_rows, n_offsets,
    COUNTED: tl.constexpr, FLAGS: tl.constexpr, CLUSTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many new coordinates each block of rows discovers, each cluster of blocks, and all of
    them."""
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = live_rows(count_ptr, n_rows, COUNTED)
    count = tl.zeros((BLOCK,), tl.int32)
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        _, owner = _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets)
        count += tl.sum(owner.to(tl.int32), 0)
    total = tl.sum(count, 0)
    tl.store(owned_ptr + block, total)
    tl.atomic_add(flags_ptr + 3, total, sem="relaxed")
    tl.atomic_add(flags_ptr + FLAGS + block // CLUSTER, total, sem="relaxed")


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_out"])
def _assign_rows(
    coords_ptr, geometry_ptr, slots_ptr, values_ptr, count_ptr, owned_ptr, flags_ptr, rows_ptr,
    out_ptr, n_rows, n_offsets, n_out, COUNTED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    FLAGS: tl.constexpr, CLUSTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number the new coordinates by (discovering row, offset) and write them, as far as `n_out`
    rows take them; rows [capacity] maps slot to number."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = live_rows(count_ptr, n_rows, COUNTED)
    cluster = tl.program_id(0) // CLUSTER
    index = cluster * CLUSTER + tl.arange(0, CLUSTER)
    before = tl.load(owned_ptr + index, mask=index < tl.program_id(0), other=0)
    for first in range(0, cluster, CLUSTER):
        index = first + tl.arange(0, CLUSTER)
        # Counters start at -1.
        before += tl.load(flags_ptr + FLAGS + index, mask=index < cluster, other=-1) + 1
    count = tl.zeros((BLOCK,), tl.int32)
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        _, owner = _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets)
        count += tl.sum(owner.to(tl.int32), 0)
    start = tl.sum(before, 0) + tl.cumsum(count, 0) - count
    batch = tl.load(coords_ptr + row.to(tl.int64) * (D + 1), mask=row < live, other=0)
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        slot, owner = _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets)
        mine = owner.to(tl.int32)
        number = start[None, :] + tl.cumsum(mine, 0) - mine
        start += tl.sum(mine, 0)
        tl.store(rows_ptr + slot, number, mask=owner)
        fits = owner & (number < n_out)
        target = out_ptr + number.to(tl.int64) * (D + 1)
        tl.store(target, batch + tl.zeros_like(number), mask=fits)
        tap = tl.minimum(v, n_offsets - 1)
        for axis in tl.static_range(D):
            c = coordinate(coords_ptr, geometry_ptr, row, tap, row < live, axis, D, WIDE)
            tl.store(target + 1 + axis, c, mask=fits)


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_columns"])
def _link_rows(
    slots_ptr, rows_ptr, count_ptr, nbr_ptr, transposed_ptr, mask_ptr, n_rows, n_offsets,
    n_columns, COUNTED: tl.constexpr,
):  # fmt: skip
    """Turn slots [V, n_rows] into numbers, and scatter the transposed table [V, n_columns]."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < live_rows(count_ptr, n_rows, COUNTED)) & (v < n_offsets)
    place = v.to(tl.int64) * n_rows + row
    slot = tl.load(slots_ptr + place, mask=inside, other=-1)
    number = tl.load(rows_ptr + slot, mask=slot >= 0, other=-1)
    tl.store(nbr_ptr + place, number, mask=inside)
    tl.store(
        transposed_ptr + v.to(tl.int64) * n_columns + number,
        row + tl.zeros_like(number),
        mask=(number >= 0) & (number < n_columns),
    )
    _store_mask(number, mask_ptr, n_rows, 32)


lookup_kernel = register(_neighbor_lookup)
masks_kernel = register(_table_masks)
count_kernel = register(_count_owned)
assign_kernel = register(_assign_rows)
link_kernel = register(_link_rows)

_OPTIONS = {"num_warps": 4}
_LOOKUP_ROWS = 8
_OWNER_ROWS = 32  # rows per program that numbers new coordinates
_CLUSTER = 256  # such programs per intermediate sum


@dataclasses.dataclass(eq=False)
class NeighborTable:
    """nbr [V, N] and mask [W, N] as described above (None until somebody asks for it).

    count: int32 on the device, one less than the rows in use; the columns behind them mean nothing.
    None if all are.
    """

    nbr: torch.Tensor
    mask: torch.Tensor | None = None
    count: torch.Tensor | None = None

    @property
    def n_rows(self) -> int:
        return self.nbr.shape[1]

    @property
    def n_offsets(self) -> int:
        return self.nbr.shape[0]

    def masks(self, target: Target) -> torch.Tensor:
        """The offset masks, made if nobody left them."""
        if self.mask is None:
            n_offsets, n_rows = self.nbr.shape
            grid = _grid(n_rows, n_offsets)
            self.mask = self.nbr.new_empty((grid[1], n_rows))
            masks_kernel.launch(
                self.nbr.device, target, grid, (self.nbr, self.mask, n_rows, n_offsets), (),
                _OPTIONS, self.nbr.data_ptr() % 16,
            )  # fmt: skip
        return self.mask

    def used(self, n_rows: int) -> NeighborTable:
        """The table of its first `n_rows` rows, those in use."""
        if n_rows == self.n_rows:
            return NeighborTable(self.nbr, self.mask)
        mask = None if self.mask is None else self.mask[:, :n_rows].contiguous()
        return NeighborTable(self.nbr[:, :n_rows].contiguous(), mask)


def _grid(n_rows: int, n_offsets: int) -> tuple[int, int, int]:
    return cdiv(n_rows, ROWS), cdiv(n_offsets, OFFSETS), 1


def neighbor_lookup(
    table: HashTable, n_values: int, coords: torch.Tensor, geometry: torch.Tensor,
    bounds: torch.Tensor, alive: torch.Tensor | None, n_offsets: int, center: int, wide: bool,
    target: Target, count: torch.Tensor | None = None,
) -> NeighborTable:  # fmt: skip
    """Table of what the rows of `coords` reach among the keys of `table`, with masks.

    n_values: rows that were inserted in `table`.  center: the offset that is every row itself, or
    -1.  count: of the rows in use, see `NeighborTable`.
    """
    n_rows, columns = coords.shape
    # A single warp waits only for its own slowest look-up.
    grid = (cdiv(n_rows, _LOOKUP_ROWS), cdiv(n_offsets, OFFSETS), 1)
    nbr = torch.empty((n_offsets, n_rows), dtype=torch.int32, device=coords.device)
    mask = nbr.new_empty((grid[1], n_rows))
    constants = (
        alive is not None, count is not None, table.reversed, columns - 1, table.key64, wide,
        _LOOKUP_ROWS,
    )  # fmt: skip
    args = (
        coords, geometry, bounds, geometry if alive is None else alive,
        geometry if count is None else count, table.keys, table.values, nbr, mask, n_rows, n_values,
        n_offsets, table.capacity, min(MAX_PROBES, table.capacity), center,
    )  # fmt: skip
    lookup_kernel.launch(
        coords.device, target, grid, args, constants, {"num_warps": 1},
        (constants, coords.data_ptr() % 16),
    )  # fmt: skip
    return NeighborTable(nbr, mask, count)


def count_owners(
    table: HashTable, slots: torch.Tensor, target: Target, count: torch.Tensor | None = None
) -> torch.Tensor:
    """New coordinates discovered by each block of rows, after `hash_insert`; their sum goes to the
    table's counters.

    slots: [V, N].  count: of the rows in use, see `NeighborTable`.
    """
    n_offsets, n_rows = slots.shape
    blocks = cdiv(n_rows, _OWNER_ROWS)
    owned = slots.new_empty(blocks)
    constants = (count is not None, FLAGS, _CLUSTER, _OWNER_ROWS)
    count_kernel.launch(
        slots.device, target, (blocks, 1, 1), (slots, table.values, slots if count is None else
        count, owned, table.flags, n_rows, n_offsets), constants, _OPTIONS, constants[0],
    )  # fmt: skip
    return owned


def count_new_rows(
    table: HashTable, slots: torch.Tensor, target: Target
) -> tuple[torch.Tensor, int, bool]:
    """(new coordinates discovered by each block of rows, how many in all, overflow) after
    `hash_insert`.

    slots: [V, N].  Waits for the device once.
    """
    owned = count_owners(table, slots, target)
    _, _, overflow, total = table.flags.tolist()[:FLAGS]
    return owned, total + 1, overflow > 0


def owner_counters(n_rows: int) -> int:
    """Counters that `count_owners` needs in the table's memory beyond its own."""
    return cdiv(n_rows, _OWNER_ROWS * _CLUSTER)


def number_new_rows(
    table: HashTable, slots: torch.Tensor, owned: torch.Tensor, n_new: int, coords: torch.Tensor,
    geometry: torch.Tensor, wide: bool, target: Target, count: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Give the distinct keys that `hash_insert` left in `table` their rows: the new coordinates
    [n_new, 1 + D].

    Order: by the smallest input row that reaches a key, then by offset; the same on every run and
    device. slots: [V, N] from `hash_insert`; owned: from `count_owners`.  n_new: how many keys
    there are, or at most; what exceeds it is not written.  count: of the rows in use, see
    `NeighborTable`.  `table` then maps keys to the new rows.
    """
    n_offsets, n_rows = slots.shape
    rows, new = slots.new_empty(table.capacity), slots.new_empty((n_new, coords.shape[1]))
    constants = (count is not None, coords.shape[1] - 1, wide, FLAGS, _CLUSTER, _OWNER_ROWS)
    args = (
        coords, geometry, slots, table.values, slots if count is None else count, owned,
        table.flags, rows, new, n_rows, n_offsets, n_new,
    )  # fmt: skip
    assign_kernel.launch(
        slots.device, target, (cdiv(n_rows, _OWNER_ROWS), 1, 1), args, constants, _OPTIONS,
        (constants, coords.data_ptr() % 16),
    )  # fmt: skip
    table.values, table.reversed = rows, False
    return new


def link_new_rows(
    table: HashTable, slots: torch.Tensor, n_new: int, target: Target,
    count: torch.Tensor | None = None, count_new: torch.Tensor | None = None,
) -> tuple[NeighborTable, NeighborTable]:  # fmt: skip
    """(table input row -> new row [V, N] with masks, its transpose [V, n_new] without), after
    `number_new_rows`, in whose terms the arguments are; `slots` is reused for the former."""
    n_offsets, n_rows = slots.shape
    grid = _grid(n_rows, n_offsets)
    mask = slots.new_empty((grid[1], n_rows))
    transposed = torch.full((n_offsets, n_new), -1, dtype=torch.int32, device=slots.device)
    args = (
        slots, table.values, slots if count is None else count, slots, transposed, mask, n_rows,
        n_offsets, n_new,
    )  # fmt: skip
    counted = count is not None
    link_kernel.launch(slots.device, target, grid, args, (counted,), _OPTIONS, counted)
    return NeighborTable(slots, mask, count), NeighborTable(transposed, None, count_new)
