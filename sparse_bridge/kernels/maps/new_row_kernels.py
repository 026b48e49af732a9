"""Kernels of `new_rows`: count new coordinates, number them, write them, link them to old rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.launch import register
from .coord_key import coordinate, live_rows, row_offset
from .hash_kernels import value_at
from .mask_kernels import store_mask


@triton.jit
def _owners(slots_ptr, values_ptr, step, row, position, live, n_rows, n_row_offsets):
    """(slot, whether `row` is the smallest one that reaches it), [BLOCK_V, rows]."""
    inside = (row < live) & (position < n_row_offsets)
    slot = tl.load(slots_ptr + position.to(tl.int64) * n_rows + row, mask=inside, other=-1)
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
    if block * BLOCK >= live:
        tl.store(owned_ptr + block, 0)
        return
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, n_row_offsets, BLOCK_V):
        position = first + tl.arange(0, BLOCK_V)[:, None]
        _, owner = _owners(slots_ptr, values_ptr, step, row, position, live, n_rows, n_row_offsets)
        count += tl.sum(owner.to(tl.int32), 0)
    total = tl.sum(count, 0)
    tl.store(owned_ptr + block, total)
    tl.atomic_add(flags_ptr + 3, total, sem="relaxed")
    tl.atomic_add(flags_ptr + FLAGS + block // CLUSTER, total, sem="relaxed")


@triton.jit
def _number(values_ptr, step, out_ptr, slot, owner, row, position, start, n_out, D: tl.constexpr):
    """Store the numbers of these [BLOCK_V, rows] new coordinates, of which each row's begin at
    `start`, and who discovered them. Numbers take the place of claims, with which no reader can
    confuse them: those are never negative."""
    mine = owner.to(tl.int32)
    number = start[None, :] + tl.cumsum(mine, 0) - mine
    fits = owner & (number < n_out)
    tl.store(value_at(values_ptr, slot, step), tl.where(fits, -2 - number, -1), mask=owner)
    target = out_ptr + number.to(tl.int64) * (D + 1)
    tl.store(target, row + tl.zeros_like(number), mask=fits)
    tl.store(target + 1, position + tl.zeros_like(number), mask=fits)


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
    """Number the new coordinates by (discovering row, position of the offset), and store these two in
    the first columns of out [n_out, D + 1], as far as it takes them; values become numbers, -1
    beyond that. ONE: there are at most BLOCK_V positions, which are looked at once."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = live_rows(count_ptr, n_rows, counted)
    if tl.program_id(0) * BLOCK >= live:
        return
    cluster = tl.program_id(0) // CLUSTER
    index = cluster * CLUSTER + tl.arange(0, CLUSTER)
    earlier = tl.load(owned_ptr + index, mask=index < tl.program_id(0), other=0)
    for first in range(0, cluster, CLUSTER):
        index = first + tl.arange(0, CLUSTER)
        # Counters start at -1.
        earlier += tl.load(flags_ptr + FLAGS + index, mask=index < cluster, other=-1) + 1
    begin = tl.sum(earlier, 0)
    if ONE:
        position = tl.arange(0, BLOCK_V)[:, None]
        slot, owner = _owners(slots_ptr, values_ptr, step, row, position, live, n_rows, n_row_offsets)
        count = tl.sum(owner.to(tl.int32), 0)
        start = begin + tl.cumsum(count, 0) - count
        _number(values_ptr, step, out_ptr, slot, owner, row, position, start, n_out, D)
    else:
        count = tl.zeros((BLOCK,), tl.int32)
        for least in range(0, n_row_offsets, BLOCK_V):
            position = least + tl.arange(0, BLOCK_V)[:, None]
            _, owner = _owners(slots_ptr, values_ptr, step, row, position, live, n_rows, n_row_offsets)
            count += tl.sum(owner.to(tl.int32), 0)
        start = begin + tl.cumsum(count, 0) - count
        for least in range(0, n_row_offsets, BLOCK_V):
            position = least + tl.arange(0, BLOCK_V)[:, None]
            slot, owner = _owners(slots_ptr, values_ptr, step, row, position, live, n_rows, n_row_offsets)
            _number(values_ptr, step, out_ptr, slot, owner, row, position, start, n_out, D)
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
    """The coordinates of new rows instead of (discovering row, position of the offset)."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = live_rows(flags_ptr + 3, n_out, 1)
    if tl.program_id(0) * BLOCK >= live:
        return
    ok = number < live
    target = out_ptr + number.to(tl.int64) * (D + 1)
    row = tl.load(target, mask=ok, other=0)
    position = tl.load(target + 1, mask=ok, other=0)
    v = row_offset(coords_ptr, geometry_ptr, classes_ptr, row, position, ok, n_row_offsets, D, WIDE, DIVISION, CLASSES)
    v = tl.maximum(v, 0)  # where there is no row
    batch = tl.load(coords_ptr + row.to(tl.int64) * (D + 1), mask=ok, other=0)
    tl.store(target, batch, mask=ok)
    for axis in tl.static_range(D):
        c = coordinate(coords_ptr, geometry_ptr, row, v, ok, axis, D, WIDE, DIVISION)
        tl.store(target + 1 + axis, c, mask=ok)


@triton.jit(do_not_specialize=["last_ptr", "n_rows"])
def _repeat_first(coords_ptr, last_ptr, n_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """The first row behind those in use; zeros where none is."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = live_rows(last_ptr, n_rows, 1)
    unused = (row >= live) & (row < n_rows)
    for column in tl.static_range(D + 1):
        first = tl.load(coords_ptr + column, mask=live > 0, other=0)
        tl.store(coords_ptr + row.to(tl.int64) * (D + 1) + column, tl.zeros_like(row) + first, mask=unused)


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

    LINK: write the table of the old rows [V, n_rows] too. With CLASSES it holds -1 before;
    otherwise every position is an offset, the table replaces the slots, and its masks are stored.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    position = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
    live = live_rows(count_ptr, n_rows, counted)
    if tl.program_id(0) * ROWS >= live:
        return  # nobody reads masks of rows that are not in use
    row_ok = row < live
    inside = row_ok & (position < n_row_offsets)
    at = position.to(tl.int64) * n_rows + row
    slot = tl.load(slots_ptr + at, mask=inside, other=-1)
    number = -2 - tl.load(value_at(values_ptr, slot, step), mask=slot >= 0, other=-1)
    v = row_offset(
        coords_ptr, geometry_ptr, classes_ptr, row, position, row_ok, n_row_offsets, D, WIDE, DIVISION, CLASSES
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
repeat_kernel = register(_repeat_first)
link_kernel = register(_link_rows)
