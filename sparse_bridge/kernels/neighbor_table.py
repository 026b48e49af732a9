"""Neighbour tables: for every offset and output row the input row, or -1.

`nbr` is int32 `[V, N]`, offset-major. Beside it builders leave what the row order needs: `mask`
int32 `[W, N]`, bit v % 32 of word v // 32 = offset v present, W = ceil(V / 32).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from .coord_key import coordinate, locate
from .hash_table import FLAGS, MAX_PROBES, HashTable, hash_find
from .launch import cdiv, register, specialise
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
    coords_ptr, geometry_ptr, bounds_ptr, alive_ptr, keys_ptr, values_ptr, nbr_ptr, mask_ptr,
    n_rows, n_values, n_offsets, capacity, max_probes, center, HAS_ALIVE: tl.constexpr,
    REVERSED: tl.constexpr, D: tl.constexpr, KEY64: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Look up what ROWS rows reach by 32 offsets. Offset `center` (-1: none) is every row itself,
    found or not."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < n_rows) & (v < n_offsets)
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
def _owners(slots_ptr, values_ptr, row, v, n_rows, n_offsets):
    """(slot, whether `row` is the smallest one that reaches it), [OFFSETS, rows]."""
    inside = (row < n_rows) & (v < n_offsets)
    slot = tl.load(slots_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    value = tl.load(values_ptr + slot, mask=slot >= 0, other=-1)
    return slot, (slot >= 0) & (value == n_rows - 1 - row)


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _count_owned(
    slots_ptr, values_ptr, owned_ptr, flags_ptr, n_rows, n_offsets,
    FLAGS: tl.constexpr, CLUSTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many new coordinates each block of rows discovers, each cluster of blocks, and all of
    them."""
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    count = tl.zeros((BLOCK,), tl.int32)
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        _, owner = _owners(slots_ptr, values_ptr, row, v, n_rows, n_offsets)
        count += tl.sum(owner.to(tl.int32), 0)
    total = tl.sum(count, 0)
    tl.store(owned_ptr + block, total)
    tl.atomic_add(flags_ptr + 3, total, sem="relaxed")
    tl.atomic_add(flags_ptr + FLAGS + block // CLUSTER, total, sem="relaxed")


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _assign_rows(
    coords_ptr, geometry_ptr, slots_ptr, values_ptr, owned_ptr, flags_ptr, rows_ptr, out_ptr,
    n_rows, n_offsets, D: tl.constexpr, WIDE: tl.constexpr, FLAGS: tl.constexpr,
    CLUSTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number the new coordinates by (discovering row, offset) and write them; rows [capacity] maps
    slot to number."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
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
        _, owner = _owners(slots_ptr, values_ptr, row, v, n_rows, n_offsets)
        count += tl.sum(owner.to(tl.int32), 0)
    start = tl.sum(before, 0) + tl.cumsum(count, 0) - count
    batch = tl.load(coords_ptr + row.to(tl.int64) * (D + 1), mask=row < n_rows, other=0)
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        slot, owner = _owners(slots_ptr, values_ptr, row, v, n_rows, n_offsets)
        mine = owner.to(tl.int32)
        number = start[None, :] + tl.cumsum(mine, 0) - mine
        start += tl.sum(mine, 0)
        tl.store(rows_ptr + slot, number, mask=owner)
        target = out_ptr + number.to(tl.int64) * (D + 1)
        tl.store(target, batch + tl.zeros_like(number), mask=owner)
        tap = tl.minimum(v, n_offsets - 1)
        for axis in tl.static_range(D):
            c = coordinate(coords_ptr, geometry_ptr, row, tap, row < n_rows, axis, D, WIDE)
            tl.store(target + 1 + axis, c, mask=owner)


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_columns"])
def _link_rows(
    slots_ptr, rows_ptr, nbr_ptr, transposed_ptr, mask_ptr, n_rows, n_offsets, n_columns
):  # fmt: skip
    """Turn slots [V, n_rows] into numbers, and scatter the transposed table [V, n_columns]."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < n_rows) & (v < n_offsets)
    place = v.to(tl.int64) * n_rows + row
    slot = tl.load(slots_ptr + place, mask=inside, other=-1)
    number = tl.load(rows_ptr + slot, mask=slot >= 0, other=-1)
    tl.store(nbr_ptr + place, number, mask=inside)
    tl.store(
        transposed_ptr + v.to(tl.int64) * n_columns + number,
        row + tl.zeros_like(number),
        mask=number >= 0,
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
    """nbr [V, N] and mask [W, N] as described above (None until somebody asks for it)."""

    nbr: torch.Tensor
    mask: torch.Tensor | None = None

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
                _OPTIONS, specialise(self.nbr.data_ptr()),
            )  # fmt: skip
        return self.mask


def _grid(n_rows: int, n_offsets: int) -> tuple[int, int, int]:
    return cdiv(n_rows, ROWS), cdiv(n_offsets, OFFSETS), 1


def neighbor_lookup(
    table: HashTable, n_values: int, coords: torch.Tensor, geometry: torch.Tensor,
    bounds: torch.Tensor, alive: torch.Tensor | None, n_offsets: int, center: int, wide: bool,
    target: Target,
) -> NeighborTable:  # fmt: skip
    """Table of what the rows of `coords` reach among the keys of `table`, with masks.

    n_values: rows that were inserted in `table`.  center: the offset that is every row itself, or
    -1.
    """
    n_rows, columns = coords.shape
    # A single warp waits only for its own slowest look-up.
    grid = (cdiv(n_rows, _LOOKUP_ROWS), cdiv(n_offsets, OFFSETS), 1)
    nbr = torch.empty((n_offsets, n_rows), dtype=torch.int32, device=coords.device)
    mask = nbr.new_empty((grid[1], n_rows))
    constants = (alive is not None, table.reversed, columns - 1, table.key64, wide, _LOOKUP_ROWS)
    args = (
        coords, geometry, bounds, nbr if alive is None else alive, table.keys, table.values, nbr,
        mask, n_rows, n_values, n_offsets, table.capacity, min(MAX_PROBES, table.capacity), center,
    )  # fmt: skip
    lookup_kernel.launch(
        coords.device, target, grid, args, constants, {"num_warps": 1},
        (constants, specialise(coords.data_ptr())),
    )  # fmt: skip
    return NeighborTable(nbr, mask)


def count_new_rows(
    table: HashTable, slots: torch.Tensor, target: Target
) -> tuple[torch.Tensor, int, bool]:
    """(new coordinates discovered by each block of rows, how many in all, overflow) after
    `hash_insert`.

    slots: [V, N].  Waits for the device once.
    """
    n_offsets, n_rows = slots.shape
    blocks = cdiv(n_rows, _OWNER_ROWS)
    owned = slots.new_empty(blocks)
    count_kernel.launch(
        slots.device, target, (blocks, 1, 1), (slots, table.values, owned, table.flags, n_rows,
        n_offsets), (FLAGS, _CLUSTER, _OWNER_ROWS), _OPTIONS, (),
    )  # fmt: skip
    _, _, overflow, total = table.flags.tolist()[:FLAGS]
    return owned, total + 1, overflow > 0


def owner_counters(n_rows: int) -> int:
    """Counters that `count_new_rows` needs in the table's memory beyond its own."""
    return cdiv(n_rows, _OWNER_ROWS * _CLUSTER)


def number_new_rows(
    table: HashTable, slots: torch.Tensor, owned: torch.Tensor, n_new: int, coords: torch.Tensor,
    geometry: torch.Tensor, wide: bool, target: Target,
) -> tuple[torch.Tensor, NeighborTable, NeighborTable]:  # fmt: skip
    """Give the `n_new` distinct keys that `hash_insert` left in `table` their rows.

    Order: by the smallest input row that reaches a key, then by offset; the same on every run and
    device. slots: [V, N] from `hash_insert`, reused for the result; owned: from `count_new_rows`.
    Returns the new coordinates [n_new, 1 + D], the table input row -> new row [V, N] with masks,
    and its transpose [V, n_new] without. `table` then maps keys to the new rows.
    """
    (n_offsets, n_rows), device = slots.shape, slots.device
    grid = _grid(n_rows, n_offsets)
    rows, mask = slots.new_empty(table.capacity), slots.new_empty((grid[1], n_rows))
    new = slots.new_empty((n_new, coords.shape[1]))
    constants = (coords.shape[1] - 1, wide, FLAGS, _CLUSTER, _OWNER_ROWS)
    assign_kernel.launch(
        device, target, (cdiv(n_rows, _OWNER_ROWS), 1, 1), (coords, geometry, slots, table.values,
        owned, table.flags, rows, new, n_rows, n_offsets), constants, _OPTIONS, (constants,
        specialise(coords.data_ptr())),
    )  # fmt: skip
    transposed = torch.full((n_offsets, n_new), -1, dtype=torch.int32, device=device)
    link_kernel.launch(
        device, target, grid, (slots, rows, slots, transposed, mask, n_rows, n_offsets, n_new), (),
        _OPTIONS, (),
    )  # fmt: skip
    table.values, table.reversed = rows, False
    return new, NeighborTable(slots, mask), NeighborTable(transposed)
