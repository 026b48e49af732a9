"""Neighbour tables: for every offset and output row the input row, or -1.

`nbr` is int32 `[V, N]`, offset-major. Beside it every builder can leave what the row order needs: `mask` int32
`[W, N]` (bit v % 32 of word v // 32 = offset v present, W = ceil(V / 32)) and `counts` int32 `[V, B]`, the present
entries of offset v among each block of `ROWS` rows.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from .coord_key import coordinate, locate
from .hash_table import MAX_PROBES, HashTable, hash_find
from .launch import register, specialise
from .target import Target

OFFSETS = 32  # offsets per program: one mask word
ROWS = 32  # rows per program


@triton.jit
def _emit(hit, v, row, mask_ptr, counts_ptr, n_rows, n_offsets, n_blocks):
    """Store the mask word and the per-block counts of a [OFFSETS, ROWS] block of hits (int32 0 or 1)."""
    bit = tl.arange(0, 32)[:, None]
    word = tl.sum(hit << bit, 0)
    row1 = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(mask_ptr + tl.program_id(1).to(tl.int64) * n_rows + row1, word, mask=row1 < n_rows)
    v1 = tl.program_id(1) * 32 + tl.arange(0, 32)
    tl.store(
        counts_ptr + v1.to(tl.int64) * n_blocks + tl.program_id(0),
        tl.sum(hit, 1),
        mask=v1 < n_offsets,
    )


@triton.jit(
    do_not_specialize=[
        "n_rows",
        "n_values",
        "n_offsets",
        "n_blocks",
        "capacity",
        "max_probes",
        "center",
    ]
)
def _neighbor_lookup(
    coords_ptr, geometry_ptr, bounds_ptr, alive_ptr, keys_ptr, values_ptr, nbr_ptr, mask_ptr, counts_ptr,
    n_rows, n_values, n_offsets, n_blocks, capacity, max_probes, center,
    HAS_ALIVE: tl.constexpr, REVERSED: tl.constexpr, D: tl.constexpr, KEY64: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Look up what 32 rows reach by 32 offsets. Offset `center` (-1: none) is every row itself, found or not."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
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
    _emit((value >= 0).to(tl.int32), v, row, mask_ptr, counts_ptr, n_rows, n_offsets, n_blocks)


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_blocks"])
def _table_stats(nbr_ptr, mask_ptr, counts_ptr, n_rows, n_offsets, n_blocks):
    """Masks and counts of an existing table."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < n_rows) & (v < n_offsets)
    value = tl.load(nbr_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    _emit((value >= 0).to(tl.int32), v, row, mask_ptr, counts_ptr, n_rows, n_offsets, n_blocks)


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _count_owned(slots_ptr, values_ptr, owned_ptr, n_rows, n_offsets):
    """How many new coordinates each row discovers: those whose slot it holds the smallest row of."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    total = tl.zeros((32,), tl.int32)
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        inside = (row < n_rows) & (v < n_offsets)
        slot = tl.load(slots_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
        value = tl.load(values_ptr + slot, mask=slot >= 0, other=-1)
        total += tl.sum(((slot >= 0) & (value == n_rows - 1 - row)).to(tl.int32), 0)
    row1 = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(owned_ptr + row1, total, mask=row1 < n_rows)


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _assign_rows(
    coords_ptr, geometry_ptr, slots_ptr, values_ptr, owned_ptr, ends_ptr, rows_ptr, out_ptr, n_rows, n_offsets,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Number the new coordinates by (discovering row, offset) and write them; rows [capacity] maps slot to number."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    row1 = tl.program_id(0) * 32 + tl.arange(0, 32)
    start = tl.load(ends_ptr + row1, mask=row1 < n_rows, other=0) - tl.load(
        owned_ptr + row1, mask=row1 < n_rows, other=0
    )
    for word in range((n_offsets + 31) // 32):
        v = word * 32 + tl.arange(0, 32)[:, None]
        inside = (row < n_rows) & (v < n_offsets)
        slot = tl.load(slots_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
        value = tl.load(values_ptr + slot, mask=slot >= 0, other=-1)
        owner = (slot >= 0) & (value == n_rows - 1 - row)
        count = owner.to(tl.int32)
        number = start[None, :] + tl.cumsum(count, 0) - count
        start += tl.sum(count, 0)
        tl.store(rows_ptr + slot, number, mask=owner)
        target = out_ptr + number.to(tl.int64) * (D + 1)
        batch = tl.load(coords_ptr + row.to(tl.int64) * (D + 1), mask=row < n_rows, other=0)
        tl.store(target, batch + tl.zeros_like(number), mask=owner)
        for axis in tl.static_range(D):
            c = coordinate(
                coords_ptr,
                geometry_ptr,
                row,
                tl.minimum(v, n_offsets - 1),
                row < n_rows,
                axis,
                D,
                WIDE,
            )
            tl.store(target + 1 + axis, c, mask=owner)


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_columns", "n_blocks"])
def _link_rows(
    slots_ptr, rows_ptr, nbr_ptr, transposed_ptr, mask_ptr, counts_ptr, n_rows, n_offsets, n_columns, n_blocks,
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
    _emit((number >= 0).to(tl.int32), v, row, mask_ptr, counts_ptr, n_rows, n_offsets, n_blocks)


@triton.jit(do_not_specialize=["n_rows", "n_offsets", "n_blocks"])
def _compact_pairs(nbr_ptr, ends_ptr, counts_ptr, in_ptr, out_ptr, n_rows, n_offsets, n_blocks):
    """Pair lists, sorted by offset then row. ends: inclusive running sum of counts, offset-major, int64."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    v = tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < n_rows) & (v < n_offsets)
    value = tl.load(nbr_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    hit = (value >= 0).to(tl.int32)
    block = v.to(tl.int64) * n_blocks + tl.program_id(0)
    end = tl.load(ends_ptr + block, mask=v < n_offsets, other=0)
    begin = end - tl.load(counts_ptr + block, mask=v < n_offsets, other=0)
    place = begin + tl.cumsum(hit, 1) - hit
    tl.store(in_ptr + place, value, mask=value >= 0)
    tl.store(out_ptr + place, row + tl.zeros_like(value), mask=value >= 0)


lookup_kernel = register(_neighbor_lookup)
stats_kernel = register(_table_stats)
count_kernel = register(_count_owned)
assign_kernel = register(_assign_rows)
link_kernel = register(_link_rows)
compact_kernel = register(_compact_pairs)

_OPTIONS = {"num_warps": 4}


@dataclasses.dataclass(eq=False)
class NeighborTable:
    """nbr [V, N]; mask [W, N] and counts [V, B] as described above (None until `table_stats`)."""

    nbr: torch.Tensor
    mask: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @property
    def n_rows(self) -> int:
        return self.nbr.shape[1]

    @property
    def n_offsets(self) -> int:
        return self.nbr.shape[0]


def _grid(n_rows: int, n_offsets: int) -> tuple[int, int, int]:
    return triton.cdiv(n_rows, ROWS), triton.cdiv(n_offsets, OFFSETS), 1


def _empty_table(n_offsets: int, n_rows: int, device: torch.device) -> NeighborTable:
    blocks, words, _ = _grid(n_rows, n_offsets)
    options = {"dtype": torch.int32, "device": device}
    return NeighborTable(
        torch.empty((n_offsets, n_rows), **options),
        torch.empty((words, n_rows), **options),
        torch.empty((n_offsets, blocks), **options),
    )


def neighbor_lookup(
    table: HashTable, n_values: int, coords: torch.Tensor, geometry: torch.Tensor, bounds: torch.Tensor,
    alive: torch.Tensor | None, n_offsets: int, center: int, wide: bool, target: Target,
) -> NeighborTable:  # fmt: skip
    """Table of what the rows of `coords` reach among the keys of `table`, with masks and counts.

    n_values: rows that were inserted in `table`.  center: the offset that is every row itself, or -1.
    """
    n_rows, columns = coords.shape
    out = _empty_table(n_offsets, n_rows, coords.device)
    constants = (alive is not None, table.reversed, columns - 1, table.key64, wide)
    args = (
        coords, geometry, bounds, out.nbr if alive is None else alive, table.keys, table.values, out.nbr, out.mask,
        out.counts, n_rows, n_values, n_offsets, triton.cdiv(n_rows, ROWS), table.capacity,
        min(MAX_PROBES, table.capacity), center,
    )  # fmt: skip
    lookup_kernel.launch(
        coords.device, target, _grid(n_rows, n_offsets), args, constants, _OPTIONS,
        (constants, specialise(coords.data_ptr())),
    )  # fmt: skip
    return out


def table_stats(table: NeighborTable, target: Target) -> None:
    """Fill in mask and counts of a table that has none."""
    if table.mask is not None:
        return
    n_offsets, n_rows = table.nbr.shape
    blocks, words, _ = _grid(n_rows, n_offsets)
    table.mask = table.nbr.new_empty((words, n_rows))
    table.counts = table.nbr.new_empty((n_offsets, blocks))
    args = (table.nbr, table.mask, table.counts, n_rows, n_offsets, blocks)
    stats_kernel.launch(
        table.nbr.device,
        target,
        (blocks, words, 1),
        args,
        (),
        _OPTIONS,
        specialise(table.nbr.data_ptr()),
    )


def count_new_rows(
    table: HashTable, slots: torch.Tensor, target: Target
) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """(new coordinates discovered by each row, their running sum, how many in all, overflow) after `hash_insert`.

    slots: [V, N].  Waits for the device once.
    """
    n_offsets, n_rows = slots.shape
    owned = slots.new_empty(n_rows)
    count_kernel.launch(
        slots.device, target, (triton.cdiv(n_rows, ROWS), 1, 1), (slots, table.values, owned, n_rows, n_offsets), (),
        _OPTIONS, (),
    )  # fmt: skip
    ends = owned.cumsum(0, dtype=torch.int32)
    table.flags[3:].copy_(ends[-1:])
    _, _, overflow, total = table.flags.tolist()
    return owned, ends, total, overflow > 0


def number_new_rows(
    table: HashTable, slots: torch.Tensor, owned: torch.Tensor, ends: torch.Tensor, n_new: int, coords: torch.Tensor,
    geometry: torch.Tensor, wide: bool, target: Target,
) -> tuple[torch.Tensor, NeighborTable, NeighborTable]:  # fmt: skip
    """Give the `n_new` distinct keys that `hash_insert` left in `table` their rows.

    Order: by the smallest input row that reaches a key, then by offset; the same on every run and device.
    slots: [V, N] from `hash_insert`, reused for the result; owned, ends: from `count_new_rows`.  Returns the new
    coordinates [n_new, 1 + D], the table input row -> new row [V, N] with masks and counts, and its transpose
    [V, n_new] without. `table` then maps keys to the new rows.
    """
    (n_offsets, n_rows), device = slots.shape, slots.device
    blocks, words, _ = _grid(n_rows, n_offsets)
    rows = slots.new_empty(table.capacity)
    new = slots.new_empty((n_new, coords.shape[1]))
    constants = (coords.shape[1] - 1, wide)
    assign_kernel.launch(
        device, target, (blocks, 1, 1),
        (coords, geometry, slots, table.values, owned, ends, rows, new, n_rows, n_offsets), constants, _OPTIONS,
        (constants, specialise(coords.data_ptr())),
    )  # fmt: skip
    transposed = torch.full((n_offsets, n_new), -1, dtype=torch.int32, device=device)
    linked = NeighborTable(
        slots, slots.new_empty((words, n_rows)), slots.new_empty((n_offsets, blocks))
    )
    link_kernel.launch(
        device, target, (blocks, words, 1),
        (slots, rows, slots, transposed, linked.mask, linked.counts, n_rows, n_offsets, n_new, blocks), (), _OPTIONS,
        (),
    )  # fmt: skip
    table.values, table.reversed = rows, False
    return new, linked, NeighborTable(transposed)


def compact_pairs(
    table: NeighborTable, n_lists: int, target: Target
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pair lists of the first `n_lists` offsets: (in_rows [P], out_rows [P], starts [n_lists + 1] int64, on device).

    Waits for the device once, to learn P.
    """
    table_stats(table, target)
    assert table.counts is not None
    counts = table.counts[:n_lists]
    blocks = counts.shape[1]
    ends = counts.reshape(-1).cumsum(0, dtype=torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends.view(n_lists, blocks)[:, -1]])
    total = int(starts[-1])
    in_rows, out_rows = counts.new_empty(total), counts.new_empty(total)
    if total:
        compact_kernel.launch(
            counts.device, target, _grid(table.n_rows, n_lists),
            (table.nbr, ends, counts, in_rows, out_rows, table.n_rows, n_lists, blocks), (), _OPTIONS, (),
        )  # fmt: skip
    return in_rows, out_rows, starts
