"""New coordinates of strided layers: counted, numbered and written, after `hash_insert`.

Every candidate belongs to the smallest input row that reaches it (the table's value says which);
numbers follow by that row, then by offset, so that they are the same on every run and device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .coord_key import Geometry, coordinate, live_rows
from .hash_table import FLAGS, HashTable
from .launch import cdiv, register
from .neighbor_table import OPTIONS, NeighborTable, grid_of, store_mask
from .target import Target


@triton.jit
def _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets):
    """(slot, whether `row` is the smallest one that reaches it), [OFFSETS, rows]."""
    inside = (row < live) & (v < n_offsets)
    slot = tl.load(slots_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    value = tl.load(values_ptr + slot, mask=slot >= 0, other=-1)
    return slot, (slot >= 0) & (value == n_rows - 1 - row)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted", "n_offsets"])
def _count_owned(
    slots_ptr, values_ptr, count_ptr, owned_ptr, flags_ptr, n_rows, counted, n_offsets,
    FLAGS: tl.constexpr, CLUSTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many new coordinates each block of rows discovers, each cluster of blocks, and all of
    them."""
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = live_rows(count_ptr, n_rows, counted)
    count = tl.zeros((BLOCK,), tl.int32)
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        _, owner = _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets)
        count += tl.sum(owner.to(tl.int32), 0)
    total = tl.sum(count, 0)
    tl.store(owned_ptr + block, total)
    tl.atomic_add(flags_ptr + 3, total, sem="relaxed")
    tl.atomic_add(flags_ptr + FLAGS + block // CLUSTER, total, sem="relaxed")


@triton.jit
def _number(rows_ptr, out_ptr, slot, owner, row, v, start, n_out, D: tl.constexpr):
    """Store the numbers of these [32, rows] new coordinates, of which each row's begin at `start`,
    and who discovered them."""
    mine = owner.to(tl.int32)
    number = start[None, :] + tl.cumsum(mine, 0) - mine
    fits = owner & (number < n_out)
    tl.store(rows_ptr + slot, tl.where(fits, number, -1), mask=owner)
    target = out_ptr + number.to(tl.int64) * (D + 1)
    tl.store(target, row + tl.zeros_like(number), mask=fits)
    tl.store(target + 1, v + tl.zeros_like(number), mask=fits)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted", "n_offsets", "n_out"])
def _assign_rows(
    slots_ptr, values_ptr, count_ptr, owned_ptr, flags_ptr, rows_ptr, out_ptr, n_rows, counted,
    n_offsets, n_out, D: tl.constexpr, FLAGS: tl.constexpr, CLUSTER: tl.constexpr,
    BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Number the new coordinates by (discovering row, offset), and leave these two in the first
    columns of out [n_out, D + 1], as far as it takes them; rows [capacity] maps slot to number, or
    to -1 beyond that. ONE: there are at most 32 offsets, which are looked at once."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = live_rows(count_ptr, n_rows, counted)
    cluster = tl.program_id(0) // CLUSTER
    index = cluster * CLUSTER + tl.arange(0, CLUSTER)
    before = tl.load(owned_ptr + index, mask=index < tl.program_id(0), other=0)
    for first in range(0, cluster, CLUSTER):
        index = first + tl.arange(0, CLUSTER)
        # Counters start at -1.
        before += tl.load(flags_ptr + FLAGS + index, mask=index < cluster, other=-1) + 1
    begin = tl.sum(before, 0)
    if ONE:
        v = tl.arange(0, 32)[:, None]
        slot, owner = _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets)
        count = tl.sum(owner.to(tl.int32), 0)
        start = begin + tl.cumsum(count, 0) - count
        _number(rows_ptr, out_ptr, slot, owner, row, v, start, n_out, D)
    else:
        count = tl.zeros((BLOCK,), tl.int32)
        for word in range((n_offsets + 31) // 32):
            v = word * 32 + tl.arange(0, 32)[:, None]
            _, owner = _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets)
            count += tl.sum(owner.to(tl.int32), 0)
        start = begin + tl.cumsum(count, 0) - count
        for word in range((n_offsets + 31) // 32):
            v = word * 32 + tl.arange(0, 32)[:, None]
            slot, owner = _owners(slots_ptr, values_ptr, row, v, live, n_rows, n_offsets)
            _number(rows_ptr, out_ptr, slot, owner, row, v, start, n_out, D)
            start += tl.sum(owner.to(tl.int32), 0)


@triton.jit(do_not_specialize=["n_out"])
def _place_rows(
    coords_ptr, geometry_ptr, flags_ptr, out_ptr, n_out, D: tl.constexpr, WIDE: tl.constexpr,
    DIVISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The coordinates of new rows in place of their (discovering row, offset)."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = number < live_rows(flags_ptr + 3, n_out, 1)
    target = out_ptr + number.to(tl.int64) * (D + 1)
    row = tl.load(target, mask=ok, other=0)
    v = tl.load(target + 1, mask=ok, other=0)
    batch = tl.load(coords_ptr + row.to(tl.int64) * (D + 1), mask=ok, other=0)
    tl.store(target, batch, mask=ok)
    for axis in tl.static_range(D):
        c = coordinate(coords_ptr, geometry_ptr, row, v, ok, axis, D, WIDE, DIVISION)
        tl.store(target + 1 + axis, c, mask=ok)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted", "n_offsets", "n_columns"])
def _link_rows(
    slots_ptr, rows_ptr, count_ptr, nbr_ptr, transposed_ptr, mask_ptr, n_rows, counted,
    n_offsets, n_columns,
):  # fmt: skip
    """Turn slots [V, n_rows] into numbers, and scatter the transposed table [V, n_columns]."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < live_rows(count_ptr, n_rows, counted)) & (v < n_offsets)
    place = v.to(tl.int64) * n_rows + row
    slot = tl.load(slots_ptr + place, mask=inside, other=-1)
    number = tl.load(rows_ptr + slot, mask=slot >= 0, other=-1)
    tl.store(nbr_ptr + place, number, mask=inside)
    tl.store(
        transposed_ptr + v.to(tl.int64) * n_columns + number,
        row + tl.zeros_like(number),
        mask=(number >= 0) & (number < n_columns),
    )
    store_mask(number, mask_ptr, n_rows, 32)


count_kernel = register(_count_owned)
assign_kernel = register(_assign_rows)
place_kernel = register(_place_rows)
link_kernel = register(_link_rows)

_OWNER_ROWS = 32  # rows per program that numbers new coordinates
_CLUSTER = 256  # such programs per intermediate sum
_PLACE_ROWS = 256  # rows per program that writes new coordinates


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
    constants = (FLAGS, _CLUSTER, _OWNER_ROWS)
    count_kernel.launch(
        slots.device, target, (blocks, 1, 1), (slots, table.values, slots if count is None else
        count, owned, table.flags, n_rows, int(count is not None), n_offsets), constants, OPTIONS,
        (),
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
    geometry: Geometry, wide: bool, target: Target, count: torch.Tensor | None = None,
    blank: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Give the distinct keys that `hash_insert` left in `table` their rows: the new coordinates
    [n_new, 1 + D].

    Order: by the smallest input row that reaches a key, then by offset; the same on every run and
    device. slots: [V, N] from `hash_insert`; owned: from `count_owners`.  n_new: how many keys
    there are, or at most; what exceeds it is not written.  count: of the rows in use, see
    `NeighborTable`.  blank: zeros where no key is.  `table` then maps keys to the new rows.
    """
    n_offsets, n_rows = slots.shape
    rows, shape = slots.new_empty(table.capacity), (n_new, coords.shape[1])
    new = slots.new_zeros(shape) if blank else slots.new_empty(shape)
    dimension = coords.shape[1] - 1
    constants = (dimension, FLAGS, _CLUSTER, _OWNER_ROWS, n_offsets <= 32)
    args = (
        slots, table.values, slots if count is None else count, owned, table.flags, rows, new,
        n_rows, int(count is not None), n_offsets, n_new,
    )  # fmt: skip
    assign_kernel.launch(
        slots.device, target, (cdiv(n_rows, _OWNER_ROWS), 1, 1), args, constants, OPTIONS,
        constants,
    )  # fmt: skip
    form = (dimension, wide, geometry.division, _PLACE_ROWS)
    if n_new:
        place_kernel.launch(
            slots.device, target, (cdiv(n_new, _PLACE_ROWS), 1, 1), (coords, geometry.table,
            table.flags, new, n_new), form, OPTIONS, (form, coords.data_ptr() % 16),
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
    grid = grid_of(n_rows, n_offsets)
    mask = slots.new_empty((grid[1], n_rows))
    transposed = torch.full((n_offsets, n_new), -1, dtype=torch.int32, device=slots.device)
    args = (
        slots, table.values, slots if count is None else count, slots, transposed, mask, n_rows,
        int(count is not None), n_offsets, n_new,
    )  # fmt: skip
    link_kernel.launch(slots.device, target, grid, args, (), OPTIONS, ())
    return NeighborTable(slots, mask, count), NeighborTable(transposed, None, count_new)
