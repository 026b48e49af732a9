"""Kernels of the hash table of `hash_table`: insert keys, find them, claim their values.

AMD's compilers and memory have had faults with atomics, which the loop leaves no room for. All
operands are non-negative: maxima of signed values within a wave have been taken as unsigned ones.
The loop holds atomics only, whose results come from L2, never a load that an old line of L0 could
answer; loads outside may be old, because slots only grow. It ends after `max_probes`, whatever an
atomic answers, and says so. Tables lie in the device's own memory, not in fine-grained memory.

coords_ptr: int32 [n_rows, 1 + D].  geometry_ptr, classes_ptr, bounds_ptr: see `coord_key`.  alive_ptr:
int32 [n_rows], rows below 0 are skipped.  keys_ptr: int32 or int64 (KEY64) [capacity].  values_ptr:
int32 [capacity], `step` elements apart.  flags_ptr: the counters, int32.  slots_ptr: int32
[n_row_offsets, n_rows], written. `hash_find` takes a 2-D block of keys and gives int32 slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.launch import register
from .coord_key import EMPTY, home_slot, live_rows, locate, next_slot, row_offset


@triton.jit
def key_at(keys_ptr, slot, KEY64: tl.constexpr):
    """Where the key of a slot lies: int32 keys take turns with values."""
    if KEY64:
        return keys_ptr + slot
    else:
        return keys_ptr + slot.to(tl.int64) * 2


@triton.jit
def value_at(values_ptr, slot, step):
    """Where the value of a slot lies; step: from one to the next."""
    return values_ptr + slot.to(tl.int64) * step


@triton.jit
def _block(
    coords_ptr,
    geometry_ptr,
    classes_ptr,
    bounds_ptr,
    alive_ptr,
    count_ptr,
    n_rows,
    counted,
    n_row_offsets,
    HAS_ALIVE: tl.constexpr,
    D: tl.constexpr,
    KEY64: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(row [1, ROWS], position of the offset [BLOCK_V, 1], inside, key, live) of this program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    position = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
    row_ok = row < live_rows(count_ptr, n_rows, counted)
    inside = row_ok & (position < n_row_offsets)
    v = row_offset(
        coords_ptr, geometry_ptr, classes_ptr, row, position, row_ok, n_row_offsets, D, WIDE, DIVISION, CLASSES
    )
    ok = inside & (v >= 0)
    if HAS_ALIVE:
        ok = ok & (tl.load(alive_ptr + row, mask=row < n_rows, other=-1) >= 0)
    reached = tl.maximum(v, 0)
    key, ok = locate(coords_ptr, geometry_ptr, bounds_ptr, row, reached, ok, D, KEY64, WIDE, DIVISION)
    return row, position, inside, key, ok


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted", "n_row_offsets", "capacity", "max_probes"])
def _hash_insert(
    coords_ptr,
    geometry_ptr,
    classes_ptr,
    bounds_ptr,
    alive_ptr,
    count_ptr,
    keys_ptr,
    flags_ptr,
    n_rows,
    counted,
    n_row_offsets,
    capacity,
    max_probes,
    HAS_ALIVE: tl.constexpr,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    KEY64: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Insert the keys that rows reach by offsets."""
    if tl.program_id(0) * ROWS >= live_rows(count_ptr, n_rows, counted):
        return
    _, _, _, key, ok = _block(
        coords_ptr,
        geometry_ptr,
        classes_ptr,
        bounds_ptr,
        alive_ptr,
        count_ptr,
        n_rows,
        counted,
        n_row_offsets,
        HAS_ALIVE,
        D,
        KEY64,
        WIDE,
        DIVISION,
        CLASSES,
        BLOCK_V,
        ROWS,
    )
    slot = home_slot(key, capacity, KEY64)
    pending = ok
    if not COUNT:
        # Several rows reach most keys, and reading costs less than an atomic. What is read may be
        # old, but slots only grow: a key that was there is there, or further on.
        pending = pending & (tl.load(key_at(keys_ptr, slot, KEY64), mask=ok, other=EMPTY) != key)
    fresh = tl.zeros_like(slot)
    probes = 0
    while (tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0) & (probes < max_probes):
        address = key_at(keys_ptr, slot, KEY64)
        seen = tl.atomic_max(address, key, mask=pending, sem="relaxed")
        fresh += (pending & (seen == EMPTY)).to(tl.int32)
        pending = pending & (seen != EMPTY) & (seen != key)
        key = tl.where(pending, tl.minimum(key, seen), key)
        slot = next_slot(slot, capacity)
        probes += 1
    if COUNT:
        tl.atomic_add(flags_ptr, tl.sum(tl.sum(fresh, 1), 0), sem="relaxed")
        tl.atomic_add(flags_ptr + 1, tl.sum(tl.sum(ok.to(tl.int32), 1), 0), sem="relaxed")
    lost = tl.max(tl.max(pending.to(tl.int32), 1), 0)
    if lost > 0:
        tl.atomic_max(flags_ptr + 2, lost, sem="relaxed")


@triton.jit
def hash_find(keys_ptr, key, ok, capacity, max_probes, KEY64: tl.constexpr):
    """Slot of each key of a 2-D block, or -1."""
    slot = home_slot(key, capacity, KEY64)
    # The first probe settles most searches; it does not wait for the slowest of the block.
    seen = tl.load(key_at(keys_ptr, slot, KEY64), mask=ok, other=EMPTY)
    hit = tl.where(ok & (seen == key), slot, -1)
    pending = ok & (seen > key)
    probes = 1
    while (tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0) & (probes < max_probes):
        slot = next_slot(slot, capacity)
        seen = tl.load(key_at(keys_ptr, slot, KEY64), mask=pending, other=EMPTY)
        hit = tl.where(pending & (seen == key), slot, hit)
        pending = pending & (seen > key)
        probes += 1
    return hit


@triton.jit(
    do_not_specialize=[
        "count_ptr",
        "values_ptr",
        "step",
        "n_rows",
        "counted",
        "n_row_offsets",
        "capacity",
        "max_probes",
    ]
)
def _hash_claim(
    coords_ptr,
    geometry_ptr,
    classes_ptr,
    bounds_ptr,
    alive_ptr,
    count_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    step,
    n_rows,
    counted,
    n_row_offsets,
    capacity,
    max_probes,
    HAS_ALIVE: tl.constexpr,
    ALONE: tl.constexpr,
    D: tl.constexpr,
    KEY64: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """slots [n_row_offsets, n_rows]: where the inserted keys ended up, or -1; the smallest row that
    reaches a key claims its value. ALONE: most keys are reached by one row."""
    if tl.program_id(0) * ROWS >= live_rows(count_ptr, n_rows, counted):
        return
    row, position, inside, key, ok = _block(
        coords_ptr,
        geometry_ptr,
        classes_ptr,
        bounds_ptr,
        alive_ptr,
        count_ptr,
        n_rows,
        counted,
        n_row_offsets,
        HAS_ALIVE,
        D,
        KEY64,
        WIDE,
        DIVISION,
        CLASSES,
        BLOCK_V,
        ROWS,
    )
    slot = hash_find(keys_ptr, key, ok, capacity, max_probes, KEY64)
    claim = n_rows - 1 - row + tl.zeros_like(slot)
    wins = slot >= 0
    value = value_at(values_ptr, slot, step)
    if not ALONE:  # values only grow
        wins = wins & (tl.load(value, mask=wins, other=-1) < claim)
    tl.atomic_max(value, claim, mask=wins, sem="relaxed")
    tl.store(slots_ptr + position.to(tl.int64) * n_rows + row, slot, mask=inside)


hash_insert_kernel = register(_hash_insert)
hash_claim_kernel = register(_hash_claim)
