"""Neighbour tables filled by look-ups in a hash table.

nbr_ptr and mask_ptr are nbr int32 [V, N] and mask int32 [W, N] of a `NeighborTable`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.launch import cdiv, register
from ..runtime.parts import Slab, allocate_part
from ..runtime.target import Target
from .coord_key import Reach, live_rows, locate
from .hash_kernels import hash_find, value_at
from .hash_table import MAX_PROBES, HashTable
from .mask_kernels import store_mask
from .neighbor_table import OFFSETS, NeighborTable

_LOOKUP_ROWS = 4


@triton.jit(
    do_not_specialize=[
        "count_ptr",
        "values_ptr",
        "step",
        "n_rows",
        "counted",
        "n_values",
        "n_offsets",
        "capacity",
        "max_probes",
        "center",
    ]
)
def _neighbor_lookup(
    coords_ptr,
    geometry_ptr,
    bounds_ptr,
    alive_ptr,
    count_ptr,
    keys_ptr,
    values_ptr,
    nbr_ptr,
    mask_ptr,
    step,
    n_rows,
    counted,
    n_values,
    n_offsets,
    capacity,
    max_probes,
    center,
    HAS_ALIVE: tl.constexpr,
    REVERSED: tl.constexpr,
    D: tl.constexpr,
    KEY64: tl.constexpr,
    WIDE: tl.constexpr,
    DIVISION: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Look up what ROWS rows reach by 32 offsets. Offset `center` (-1: none) is every row itself,
    found or not."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    live = live_rows(count_ptr, n_rows, counted)
    # Columns behind the rows in use become -1, too: products need not know how many there are.
    if tl.program_id(0) * ROWS >= live:
        nothing = tl.zeros((32, ROWS), tl.int32) - 1
        tl.store(nbr_ptr + v.to(tl.int64) * n_rows + row, nothing, mask=(row < n_rows) & (v < n_offsets))
        store_mask(nothing, mask_ptr, n_rows, ROWS)
        return
    inside = (row < live) & (v < n_offsets)
    ok = inside
    if HAS_ALIVE:
        ok = ok & (tl.load(alive_ptr + row, mask=row < n_rows, other=-1) >= 0)
    key, ok = locate(
        coords_ptr, geometry_ptr, bounds_ptr, row, tl.minimum(v, n_offsets - 1), ok, D, KEY64, WIDE, DIVISION
    )
    slot = hash_find(keys_ptr, key, ok, capacity, max_probes, KEY64)
    value = tl.load(value_at(values_ptr, slot, step), mask=slot >= 0, other=-1)
    if REVERSED:
        value = tl.where(slot >= 0, n_values - 1 - value, -1)
    else:
        value = -2 - value
    value = tl.where(inside & (v == center), row, value)
    tl.store(nbr_ptr + v.to(tl.int64) * n_rows + row, value, mask=(row < n_rows) & (v < n_offsets))
    store_mask(value, mask_ptr, n_rows, ROWS)


lookup_kernel = register(_neighbor_lookup)


def neighbor_lookup(
    table: HashTable, n_values: int, reach: Reach, target: Target, center: int = -1, slab: Slab | None = None
) -> NeighborTable:
    """Table int32 [V, N] of what rows reach among the keys of `table`, with masks; columns behind the rows in use
    become -1.

    n_values: rows that were inserted in `table`.  center: the offset that is every row itself, or -1.  slab: for the
    table and its masks; None: they get memory of their own.
    """
    coords, geometry, bounds, wide, alive, count = reach
    (n_rows, columns), n_offsets = coords.shape, geometry.n_offsets
    # A single warp waits only for its own slowest look-up.
    grid = (cdiv(n_rows, _LOOKUP_ROWS), cdiv(n_offsets, OFFSETS), 1)
    device, (keys, values, _) = table.device, table.own
    nbr, mask = allocate_part(slab, device, n_offsets, n_rows), allocate_part(slab, device, grid[1], n_rows)
    constants = (alive is not None, table.reversed, columns - 1, table.key64, wide, geometry.division, _LOOKUP_ROWS)
    args = (
        coords,
        geometry.table,
        bounds,
        bounds if alive is None else alive,
        bounds if count is None else count,
        keys,
        values,
        nbr,
        mask,
        table.step,
        n_rows,
        int(count is not None),
        n_values,
        n_offsets,
        table.capacity,
        min(MAX_PROBES, table.capacity),
        center,
    )
    lookup_kernel.launch(device, target, grid, args, constants, {"num_warps": 1}, (constants, coords.data_ptr() % 16))
    return NeighborTable(nbr, mask, count, blank=True)
