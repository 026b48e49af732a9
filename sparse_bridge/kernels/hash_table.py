"""A hash table on the GPU: open addressing, compare-and-swap insert, bounded linear probing.

Memory of a table with `capacity` slots (a power of two), one int32 tensor filled with -1:
keys (int32 or int64), then values (int32), then `FLAGS` counters. A value stores `n_rows - 1 - row` under an atomic
maximum, so the smallest row of equal keys wins whatever the order of execution; -1 means none. The counters start at
-1: keys inserted, live rows (both only where COUNT asks for them), and whether a key ran out of probes.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from .coord_key import EMPTY, NEVER, home_slot, locate
from .launch import register, specialise
from .target import Target

FLAGS = 4
MAX_PROBES = 512


@triton.jit(do_not_specialize=["n_rows", "capacity", "max_probes"])
def _hash_insert(
    coords_ptr, geometry_ptr, bounds_ptr, alive_ptr, keys_ptr, values_ptr, flags_ptr, slots_ptr,
    n_rows, capacity, max_probes,
    HAS_ALIVE: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, KEY64: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Insert the key that every row reaches by offset `program_id(1)`; slots [V, n_rows] gets the slot or -1.

    One lane handles one key: tensor compare-and-swap with several keys a lane does not build on every GPU.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.program_id(1)
    ok = row < n_rows
    if HAS_ALIVE:
        ok = ok & (tl.load(alive_ptr + row, mask=ok, other=-1) >= 0)
    key, ok = locate(coords_ptr, geometry_ptr, bounds_ptr, row, v, ok, D, KEY64, WIDE)
    # Every lane takes part in each compare-and-swap; those without a key do so where they meet nobody.
    slot = tl.where(ok, home_slot(key, capacity, KEY64), row & (capacity - 1))
    pending = ok
    fresh = ok & False
    probes = 0
    while (tl.max(pending.to(tl.int32), 0) > 0) & (probes < max_probes):
        expected = tl.where(pending, EMPTY, NEVER).to(key.dtype)
        seen = tl.atomic_cas(keys_ptr + slot, expected, key)
        won = pending & (seen == EMPTY)
        fresh = fresh | won
        pending = pending & (seen != EMPTY) & (seen != key)
        slot = tl.where(pending, (slot + 1) & (capacity - 1), slot)
        probes += 1
    placed = ok & (pending == 0)
    tl.atomic_max(values_ptr + slot, n_rows - 1 - row, mask=placed)
    tl.store(
        slots_ptr + v.to(tl.int64) * n_rows + row, tl.where(placed, slot, -1), mask=row < n_rows
    )
    if COUNT:
        tl.atomic_add(flags_ptr, tl.sum(fresh.to(tl.int32), 0))
        tl.atomic_add(flags_ptr + 1, tl.sum(ok.to(tl.int32), 0))
    lost = tl.max(pending.to(tl.int32), 0)
    if lost > 0:
        tl.atomic_max(flags_ptr + 2, lost)


@triton.jit
def hash_find(keys_ptr, key, ok, capacity, max_probes, KEY64: tl.constexpr):
    """Slot of each key of a 2-D block, or -1."""
    slot = home_slot(key, capacity, KEY64)
    found = tl.where(ok, -1, -1)
    pending = ok
    probes = 0
    while (tl.max(tl.max(pending.to(tl.int32), 1), 0) > 0) & (probes < max_probes):
        seen = tl.load(keys_ptr + slot, mask=pending, other=EMPTY)
        found = tl.where(pending & (seen == key), slot, found)
        pending = pending & (seen != key) & (seen != EMPTY)
        slot = (slot + 1) & (capacity - 1)
        probes += 1
    return found


hash_insert_kernel = register(_hash_insert)


@dataclasses.dataclass(eq=False)
class HashTable:
    """Slots in device memory. `values` decode to rows by `n_rows - 1 - value` when `reversed`, else directly."""

    keys: torch.Tensor
    values: torch.Tensor
    flags: torch.Tensor
    capacity: int
    reversed: bool = True

    @staticmethod
    def allocate(capacity: int, key64: bool, device: torch.device) -> HashTable:
        """An empty table; `capacity` must be a power of two of at least 64."""
        width = 2 if key64 else 1
        memory = torch.full(((width + 1) * capacity + FLAGS,), -1, dtype=torch.int32, device=device)
        keys = memory[: width * capacity]
        values = memory[width * capacity : (width + 1) * capacity]
        return HashTable(
            keys.view(torch.int64) if key64 else keys,
            values,
            memory[(width + 1) * capacity :],
            capacity,
        )

    @property
    def key64(self) -> bool:
        return self.keys.dtype == torch.int64

    def counters(self) -> tuple[int, int, bool]:
        """(keys inserted, live rows, overflow); waits for the device."""
        inserted, live, overflow, _ = self.flags.tolist()
        return inserted + 1, live + 1, overflow > 0


def hash_insert(
    table: HashTable,
    coords: torch.Tensor,
    geometry: torch.Tensor,
    bounds: torch.Tensor,
    alive: torch.Tensor | None,
    slots: torch.Tensor,
    wide: bool,
    target: Target,
) -> None:
    """Insert the coordinates that the rows of `coords` reach by every offset of `geometry`.

    With a single offset the table's counters count; with several only the overflow flag means something.

    coords: [N, 1 + D] int32, contiguous.  geometry, bounds: see `coord_key`.  alive: [N] int32, rows below 0 are
    skipped.  slots: [V, N] int32, written.  The table's counters and values are updated; the caller reads them.
    """
    n_rows, columns = coords.shape
    n_offsets = slots.numel() // n_rows
    # Several offsets leave most lanes without a key: one warp per program keeps its rounds of probing few.
    warps = 4 if n_offsets == 1 else 1
    constants = (
        alive is not None,
        n_offsets == 1,
        columns - 1,
        table.key64,
        wide,
        warps * target.warp_size,
    )
    max_probes = min(MAX_PROBES, table.capacity)
    args = (
        coords, geometry, bounds, slots if alive is None else alive, table.keys, table.values, table.flags, slots,
        n_rows, table.capacity, max_probes,
    )  # fmt: skip
    hash_insert_kernel.launch(
        coords.device, target, (triton.cdiv(n_rows, constants[-1]), n_offsets, 1), args, constants,
        {"num_warps": warps}, (constants, specialise(coords.data_ptr())),
    )  # fmt: skip
