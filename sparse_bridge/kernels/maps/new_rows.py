"""New coordinates of strided layers: counted, numbered and written, after `hash_insert`.

Every candidate belongs to the smallest input row that reaches it (the table's value says which);
numbers follow by that row, then by offset, so that they are the same on every run and device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, register
from ..runtime.parts import Operand, Part, Slab, taken
from ..runtime.target import Target
from .coord_key import Geometry, coordinate, live_rows, row_offset
from .hash_table import FLAGS, HashTable, offsets_per_program, value_at
from .neighbor_table import OPTIONS, NeighborTable, store_mask


@triton.jit
def _owners(slots_ptr, values_ptr, step, row, place, live, n_rows, n_row_offsets):
    """(slot, whether `row` is the smallest one that reaches it), [BLOCK_V, rows]."""
    inside = (row < live) & (place < n_row_offsets)
    slot = tl.load(slots_ptr + place.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    value = tl.load(value_at(values_ptr, slot, step), mask=slot >= 0, other=-1)
    return slot, (slot >= 0) & (value == n_rows - 1 - row)


@triton.jit(do_not_specialize=["values_ptr", "count_ptr", "step", "n_rows", "counted", "n_row_offsets"])
def _count_owned(
    slots_ptr,
    values_ptr,
    count_ptr,
    owned_ptr,
    flags_ptr,
    step,
    n_rows,
    counted,
    n_row_offsets,
    FLAGS: tl.constexpr,
    CLUSTER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many new coordinates each block of rows discovers, each cluster of blocks, and all of
    them."""
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = live_rows(count_ptr, n_rows, counted)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, n_row_offsets, BLOCK_V):
        place = first + tl.arange(0, BLOCK_V)[:, None]
        _, owner = _owners(slots_ptr, values_ptr, step, row, place, live, n_rows, n_row_offsets)
        count += tl.sum(owner.to(tl.int32), 0)
    total = tl.sum(count, 0)
    tl.store(owned_ptr + block, total)
    tl.atomic_add(flags_ptr + 3, total, sem="relaxed")
    tl.atomic_add(flags_ptr + FLAGS + block // CLUSTER, total, sem="relaxed")


@triton.jit
def _number(values_ptr, step, out_ptr, slot, owner, row, place, start, n_out, D: tl.constexpr):
    """Store the numbers of these [BLOCK_V, rows] new coordinates, of which each row's begin at
    `start`, and who discovered them. Numbers take the place of claims, with which no reader can
    confuse them: those are never negative."""
    mine = owner.to(tl.int32)
    number = start[None, :] + tl.cumsum(mine, 0) - mine
    fits = owner & (number < n_out)
    tl.store(value_at(values_ptr, slot, step), tl.where(fits, -2 - number, -1), mask=owner)
    target = out_ptr + number.to(tl.int64) * (D + 1)
    tl.store(target, row + tl.zeros_like(number), mask=fits)
    tl.store(target + 1, place + tl.zeros_like(number), mask=fits)


@triton.jit(do_not_specialize=["values_ptr", "count_ptr", "step", "n_rows", "counted", "n_row_offsets", "n_out"])
def _assign_rows(
    slots_ptr,
    values_ptr,
    count_ptr,
    owned_ptr,
    flags_ptr,
    out_ptr,
    step,
    n_rows,
    counted,
    n_row_offsets,
    n_out,
    D: tl.constexpr,
    FLAGS: tl.constexpr,
    CLUSTER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    """Number the new coordinates by (discovering row, place of the offset), and leave these two in
    the first columns of out [n_out, D + 1], as far as it takes them; values become numbers, -1
    beyond that. ONE: there are at most BLOCK_V places, which are looked at once."""
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
        place = tl.arange(0, BLOCK_V)[:, None]
        slot, owner = _owners(slots_ptr, values_ptr, step, row, place, live, n_rows, n_row_offsets)
        count = tl.sum(owner.to(tl.int32), 0)
        start = begin + tl.cumsum(count, 0) - count
        _number(values_ptr, step, out_ptr, slot, owner, row, place, start, n_out, D)
    else:
        count = tl.zeros((BLOCK,), tl.int32)
        for least in range(0, n_row_offsets, BLOCK_V):
            place = least + tl.arange(0, BLOCK_V)[:, None]
            _, owner = _owners(slots_ptr, values_ptr, step, row, place, live, n_rows, n_row_offsets)
            count += tl.sum(owner.to(tl.int32), 0)
        start = begin + tl.cumsum(count, 0) - count
        for least in range(0, n_row_offsets, BLOCK_V):
            place = least + tl.arange(0, BLOCK_V)[:, None]
            slot, owner = _owners(slots_ptr, values_ptr, step, row, place, live, n_rows, n_row_offsets)
            _number(values_ptr, step, out_ptr, slot, owner, row, place, start, n_out, D)
            start += tl.sum(owner.to(tl.int32), 0)


@triton.jit(do_not_specialize=["n_out", "n_row_offsets"])
def _place_rows(
    coords_ptr,
    geometry_ptr,
    classes_ptr,
    flags_ptr,
    out_ptr,
    n_out,
    n_row_offsets,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The coordinates of new rows instead of (discovering row, place of the offset)."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = number < live_rows(flags_ptr + 3, n_out, 1)
    target = out_ptr + number.to(tl.int64) * (D + 1)
    row = tl.load(target, mask=ok, other=0)
    place = tl.load(target + 1, mask=ok, other=0)
    v = row_offset(coords_ptr, geometry_ptr, classes_ptr, row, place, ok, n_row_offsets, D, WIDE, DIVISION, CLASSES)
    v = tl.maximum(v, 0)  # where there is no row
    batch = tl.load(coords_ptr + row.to(tl.int64) * (D + 1), mask=ok, other=0)
    tl.store(target, batch, mask=ok)
    for axis in tl.static_range(D):
        c = coordinate(coords_ptr, geometry_ptr, row, v, ok, axis, D, WIDE, DIVISION)
        tl.store(target + 1 + axis, c, mask=ok)


@triton.jit(do_not_specialize=["values_ptr", "count_ptr", "step", "n_rows", "counted", "n_row_offsets", "n_columns"])
def _link_rows(
    coords_ptr,
    geometry_ptr,
    classes_ptr,
    slots_ptr,
    values_ptr,
    count_ptr,
    nbr_ptr,
    transposed_ptr,
    mask_ptr,
    step,
    n_rows,
    counted,
    n_row_offsets,
    n_columns,
    LINK: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Turn slots [n_row_offsets, n_rows] into numbers and scatter them as the table of the new
    rows [V, n_columns], which holds -1 before.

    LINK: leave the table of the old rows [V, n_rows] too. With CLASSES it holds -1 before;
    otherwise every place is an offset, it takes the place of the slots, and its masks are left.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    place = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
    there = row < live_rows(count_ptr, n_rows, counted)
    inside = there & (place < n_row_offsets)
    at = place.to(tl.int64) * n_rows + row
    slot = tl.load(slots_ptr + at, mask=inside, other=-1)
    number = -2 - tl.load(value_at(values_ptr, slot, step), mask=slot >= 0, other=-1)
    v = row_offset(
        coords_ptr, geometry_ptr, classes_ptr, row, place, there, n_row_offsets, D, WIDE, DIVISION, CLASSES
    ).to(tl.int64)
    tl.store(
        transposed_ptr + v * n_columns + number, row + tl.zeros_like(number), mask=(number >= 0) & (number < n_columns)
    )
    if LINK:
        if CLASSES:
            tl.store(nbr_ptr + v * n_rows + row, number, mask=number >= 0)
        else:
            tl.store(nbr_ptr + at, number, mask=inside)
            store_mask(number, mask_ptr, n_rows, ROWS)


count_kernel = register(_count_owned)
assign_kernel = register(_assign_rows)
place_kernel = register(_place_rows)
link_kernel = register(_link_rows)

_BLOCK = 1024  # places times rows of a program that numbers new coordinates
_CLUSTER = 256  # such programs per intermediate sum
_PLACE_ROWS = 256  # rows per program that writes new coordinates


def _shape(n_row_offsets: int) -> tuple[int, int]:
    """(places, rows) of a program."""
    block_v = offsets_per_program(n_row_offsets)
    return block_v, _BLOCK // block_v


def count_owners(
    table: HashTable, slots: Operand, target: Target, count: Operand | None = None, slab: Slab | None = None
) -> Part:
    """New coordinates discovered by each block of rows, after `hash_insert`; their sum goes to the
    table's counters.

    slots: [n_row_offsets, N].  count: of the rows in use, see `NeighborTable`.  slab: for what is
    returned, `owner_blocks` elements.
    """
    n_row_offsets, n_rows = slots.shape
    block_v, rows = _shape(n_row_offsets)
    blocks, (_, values, flags) = cdiv(n_rows, rows), table.own
    owned = taken(slab, table.device, blocks)
    constants = (FLAGS, _CLUSTER, block_v, rows)
    count_kernel.launch(
        table.device,
        target,
        (blocks, 1, 1),
        (
            slots,
            values,
            slots if count is None else count,
            owned,
            flags,
            table.step,
            n_rows,
            int(count is not None),
            n_row_offsets,
        ),
        constants,
        OPTIONS,
        constants,
    )
    return owned


def owner_blocks(n_rows: int, n_row_offsets: int) -> int:
    """Elements of what `count_owners` returns."""
    return cdiv(n_rows, _shape(n_row_offsets)[1])


def owner_counters(n_rows: int) -> int:
    """Counters that `count_owners` needs at most in the table's memory beyond its own."""
    return cdiv(n_rows, _shape(32)[1] * _CLUSTER)


def number_new_rows(
    table: HashTable,
    slots: Operand,
    owned: Operand,
    n_new: int,
    coords: torch.Tensor,
    geometry: Geometry,
    wide: bool,
    target: Target,
    count: Operand | None = None,
    zeroed: bool = False,
) -> torch.Tensor:
    """Give the distinct keys that `hash_insert` left in `table` their rows: the new coordinates
    [n_new, 1 + D].

    Order: by the smallest input row that reaches a key, then by offset; the same on every run and
    device. slots: [n_row_offsets, N] from `hash_insert`; owned: from `count_owners`.  n_new: how
    many keys there are, or at most; what exceeds it is not written.  count: of the rows in use, see
    `NeighborTable`.  zeroed: zeros where no key is.  `table` then maps keys to the new rows.
    """
    n_row_offsets, n_rows = slots.shape
    block_v, block = _shape(n_row_offsets)
    shape, (_, values, flags) = (n_new, coords.shape[1]), table.own
    new = coords.new_zeros(shape) if zeroed else coords.new_empty(shape)
    dimension = coords.shape[1] - 1
    constants = (dimension, FLAGS, _CLUSTER, block_v, block, n_row_offsets <= block_v)
    args = (
        slots,
        values,
        slots if count is None else count,
        owned,
        flags,
        new,
        table.step,
        n_rows,
        int(count is not None),
        n_row_offsets,
        n_new,
    )
    assign_kernel.launch(table.device, target, (cdiv(n_rows, block), 1, 1), args, constants, OPTIONS, constants)
    form = (dimension, wide, geometry.division, geometry.class_offsets is not None, _PLACE_ROWS)
    if n_new:
        place_kernel.launch(
            table.device,
            target,
            (cdiv(n_new, _PLACE_ROWS), 1, 1),
            (coords, geometry.table, geometry.classes, flags, new, n_new, n_row_offsets),
            form,
            OPTIONS,
            (form, coords.data_ptr() % 16),
        )
    table.reversed = False
    return new


def link_new_rows(
    table: HashTable,
    slots: Operand,
    n_new: int,
    coords: torch.Tensor,
    geometry: Geometry,
    wide: bool,
    target: Target,
    count: Operand | None = None,
    count_new: Operand | None = None,
    link: bool = True,
    slabs: tuple[Slab | None, Slab | None] = (None, None),
) -> tuple[NeighborTable | None, NeighborTable]:
    """(table input row -> new row [V, N], its transpose [V, n_new] without masks), after
    `number_new_rows`, in whose terms the arguments are; `slots` may be reused for the former.

    link: whether the former is wanted; None otherwise.  slabs: for the latter and the former, of
    -1.
    """
    (n_row_offsets, n_rows), n_offsets = slots.shape, geometry.table.shape[0] - 2
    classes, device = geometry.class_offsets is not None, table.device
    transposed = taken(slabs[0], device, n_offsets, n_new, fill=-1)
    linked, mask = slots, None
    if link and classes:
        linked = taken(slabs[1], device, n_offsets, n_rows, fill=-1)
    elif link:
        mask = taken(None, device, cdiv(n_row_offsets, 32), n_rows)
    # A mask word is made of all its offsets at once.
    block_v, rows = _shape(n_row_offsets) if classes else _shape(32)
    form = (link, coords.shape[1] - 1, wide, geometry.division, classes, block_v, rows)
    args = (
        coords,
        geometry.table,
        geometry.classes,
        slots,
        table.own[1],
        slots if count is None else count,
        linked,
        transposed,
        slots if mask is None else mask,
        table.step,
        n_rows,
        int(count is not None),
        n_row_offsets,
        n_new,
    )
    link_kernel.launch(
        device,
        target,
        (cdiv(n_rows, rows), cdiv(n_row_offsets, block_v), 1),
        args,
        form,
        OPTIONS,
        (form, coords.data_ptr() % 16),
    )
    old_rows = NeighborTable(linked, mask, count, classes) if link else None
    return old_rows, NeighborTable(transposed, None, count_new, blank=True)
