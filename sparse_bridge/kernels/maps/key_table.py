"""64-bit keys: hashing coordinate rows, and finding keys among others.

A table holds any int64 keys, so -1 (`EMPTY`) gets a slot of its own behind the others. Values are
as in `hash_table`: the smallest row of equal keys wins whatever the order of execution. The table
is at most half full, so probing ends. Its slots are claimed by compare-and-swap: the ordered
probing of `hash_table` takes maxima, which are safe on AMD for keys that are not negative alone.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from ..runtime.launch import alignment, cdiv, register
from ..runtime.target import Target
from .coord_key import EMPTY, home_slot, next_slot

BASIS = 14695981039346656037 - (1 << 64)
PRIME = 1099511628211
_BASIS = tl.constexpr(BASIS)
_PRIME = tl.constexpr(PRIME)
_BLOCK = 256


@triton.jit(do_not_specialize=["n_rows"])
def _hash_rows(
    coords_ptr,
    shift_ptr,
    key_ptr,
    n_rows,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFTED: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """key[k, i] of row i moved by shift[k] [K, 3] in columns FIRST .. FIRST + 2: h = (h ^ word) *
    prime per column."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1)
    ok = row < n_rows
    h = tl.zeros((BLOCK,), tl.int64) + _BASIS
    for column in tl.static_range(COLUMNS):
        word = tl.load(coords_ptr + row * COLUMNS + column, mask=ok, other=0)
        if SHIFTED:
            if (column >= FIRST) & (column < FIRST + 3):
                word += tl.load(shift_ptr + k * 3 + column - FIRST)
        h = (h ^ (word.to(tl.int64) & 0xFFFFFFFF)) * _PRIME
    if FOLD:
        h = ((h >> 60) & 15) ^ (h & 0x0FFFFFFFFFFFFFFF)
    tl.store(key_ptr + k.to(tl.int64) * n_rows + row, h, mask=ok)


@triton.jit(do_not_specialize=["n_keys", "capacity"])
def _insert_keys(key_ptr, table_ptr, value_ptr, n_keys, capacity, BLOCK: tl.constexpr):
    """Insert the keys; one lane a key, because wider compare-and-swap does not build on every
    GPU."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < n_keys
    key = tl.load(key_ptr + row, mask=ok, other=EMPTY)
    pending = ok & (key != EMPTY)
    slot = tl.where(pending, home_slot(key, capacity, True), row & (capacity - 1))
    while tl.max(pending.to(tl.int32), 0) > 0:
        # Lanes without work offer a slot its own kind: nothing changes, whatever it holds.
        seen = tl.atomic_cas(table_ptr + slot, tl.where(pending, EMPTY, key).to(tl.int64), key)
        pending = pending & (seen != EMPTY) & (seen != key)
        slot = tl.where(pending, next_slot(slot, capacity), slot)
    slot = tl.where(key == EMPTY, capacity, slot)
    tl.atomic_max(value_ptr + slot, n_keys - 1 - row, mask=ok)


@triton.jit(do_not_specialize=["n_queries", "n_keys", "capacity"])
def _find_keys(query_ptr, table_ptr, value_ptr, row_ptr, n_queries, n_keys, capacity, BLOCK: tl.constexpr):
    """Row of every query among the inserted keys, or -1."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = offs < n_queries
    key = tl.load(query_ptr + offs, mask=ok, other=EMPTY)
    slot = home_slot(key, capacity, True)
    hit = tl.where(ok & (key == EMPTY), capacity, -1)
    pending = ok & (key != EMPTY)
    while tl.max(pending.to(tl.int32), 0) > 0:
        seen = tl.load(table_ptr + slot, mask=pending, other=EMPTY)
        hit = tl.where(pending & (seen == key), slot, hit)
        pending = pending & (seen != key) & (seen != EMPTY)
        slot = next_slot(slot, capacity)
    value = tl.load(value_ptr + hit, mask=hit >= 0, other=-1)
    row = tl.where(value >= 0, n_keys - 1 - value, -1)
    tl.store(row_ptr + offs, row.to(row_ptr.dtype.element_ty), mask=ok)


hash_rows_kernel = register(_hash_rows)
insert_keys_kernel = register(_insert_keys)
find_keys_kernel = register(_find_keys)


def hash_rows(
    coords: torch.Tensor, shift: torch.Tensor | None, first: int, fold: bool, key: torch.Tensor, target: Target
) -> None:
    """Write key int64 [K, N] (K = 1 without shifts) for coords int32 [N, D] and shift int32 [K,
    3], contiguous."""
    n_rows, columns = coords.shape
    constants = (columns, first, shift is not None, fold, _BLOCK)
    shift_arg = coords if shift is None else shift
    hash_rows_kernel.launch(
        coords.device,
        target,
        (cdiv(n_rows, _BLOCK), key.numel() // n_rows, 1),
        (coords, shift_arg, key, n_rows),
        constants,
        {"num_warps": 4},
        (constants, alignment(coords, shift_arg, key)),
    )


@dataclasses.dataclass(eq=False)
class KeyTable:
    """keys int64 [capacity] (-1: free), values int32 [capacity + 1]; capacity is a power of two,
    n_keys were inserted."""

    keys: torch.Tensor
    values: torch.Tensor
    n_keys: int

    @property
    def capacity(self) -> int:
        """Slots, a power of two."""
        return self.keys.shape[0]


def build_table(key: torch.Tensor, capacity: int, target: Target) -> KeyTable:
    """A table of the keys int64 [N], contiguous, 1 <= N <= capacity / 2."""
    n_keys, device = key.shape[0], key.device
    table = KeyTable(
        torch.full((capacity,), -1, dtype=torch.int64, device=device),
        torch.full((capacity + 1,), -1, dtype=torch.int32, device=device),
        n_keys,
    )
    block = 4 * target.warp_size
    insert_keys_kernel.launch(
        device,
        target,
        (cdiv(n_keys, block), 1, 1),
        (key, table.keys, table.values, n_keys, capacity),
        (block,),
        {"num_warps": 4},
        (block, alignment(key, table.keys, table.values)),
    )
    return table


def find_keys(table: KeyTable, query: torch.Tensor, row: torch.Tensor, target: Target) -> None:
    """Write row [M] (int32 or int64): the first row that was inserted with the key query[m], or
    -1."""
    find_keys_kernel.launch(
        query.device,
        target,
        (cdiv(query.shape[0], _BLOCK), 1, 1),
        (query, table.keys, table.values, row, query.shape[0], table.n_keys, table.capacity),
        (_BLOCK,),
        {"num_warps": 4},
        (row.dtype, alignment(query, row)),
    )
