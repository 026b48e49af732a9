"""Orders and tiles of several tables, side by side in one launch of each kernel.

A table of few rows keeps few multiprocessors busy, and every launch costs the host as much as one
for a large table. What the kernels of `mask_order` and `tile_packing` take as arguments is read here from a record of
the table, which the grid's second axis numbers. Where one of them is large, all share one sort: the
number of the table is the most significant part of the keys.

records_ptr: int64 [tables, FIELDS]; `own_at` and `pointer_at` give the address in a field as a
pointer to int32, `number_at` the number there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, register
from ..runtime.parts import Part, memories_for, memory_of
from ..runtime.target import Target
from ..runtime.uploads import uploaded
from . import mask_order as ordering
from .coord_key import live_rows
from .gray_rank import KEY_BITS, SAMPLE, offset_block, rank_bits
from .mask_kernels import store_table_masks
from .mask_order import mask_order, store_keys, store_order
from .neighbor_table import OPTIONS, ROWS, NeighborTable, grid_of
from .tile_list import TILE, TileList
from .tile_packing import pack_tiles, store_tiles

_LAST = torch.iinfo(torch.int32).max
# Of a record, int64: addresses of nbr, masks, count, keys, order, tiles; rows, counted, offsets,
# whether the masks are still to be made; what the order calls row 0, number of the table.
FIELDS = 12


@triton.jit
def pointer_at(record_ptr, field):
    """The address in a field of a record, as a pointer to int32. record_ptr: int64 [FIELDS]."""
    return tl.load(record_ptr + field).to(tl.pointer_type(tl.int32))


@triton.jit
def own_at(record_ptr, field):
    """Address of memory that was taken for this."""
    return tl.multiple_of(pointer_at(record_ptr, field), 16)


@triton.jit
def number_at(record_ptr, field):
    """The number in a field of a record, int32. record_ptr: int64 [FIELDS]."""
    return tl.load(record_ptr + field).to(tl.int32)


@triton.jit
def _live_rows(record_ptr):
    """How many of a table's rows are in use: those that there are masks, orders and tiles of."""
    return live_rows(pointer_at(record_ptr, 2), number_at(record_ptr, 6), number_at(record_ptr, 7))


@triton.jit
def _masks_each(records_ptr, FIELDS: tl.constexpr, ROWS: tl.constexpr):
    """grid: (blocks of rows, words, tables). Of the tables that lack masks."""
    record = records_ptr + tl.program_id(2) * FIELDS
    n_rows, n_offsets = number_at(record, 6), number_at(record, 8)
    inside = (tl.program_id(0) * ROWS < _live_rows(record)) & (tl.program_id(1) * 32 < n_offsets)
    if inside & (number_at(record, 9) != 0):
        store_table_masks(pointer_at(record, 0), pointer_at(record, 1), n_rows, 0, n_offsets, ROWS)


@triton.jit(do_not_specialize=["first", "shift"])
def _keys_each(
    records_ptr,
    first,
    shift,
    FIELDS: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    SHARED: tl.constexpr,
):
    """grid: (blocks of rows, tables from `first` on, 1). SHARED: bits of the keys of one sort, with
    `shift` below that of the table; 0 where every table has a list of its own, of int32."""
    record = records_ptr + (first + tl.program_id(1)) * FIELDS
    n_rows = number_at(record, 6)
    if tl.program_id(0) * BLOCK < n_rows:
        if SHARED == 64:
            keys = tl.load(record + 3).to(tl.pointer_type(tl.int64))
        elif SHARED == 32:
            keys = pointer_at(record, 3)
        else:
            keys = own_at(record, 3)
        store_keys(
            pointer_at(record, 1),
            pointer_at(record, 2),
            keys,
            n_rows,
            number_at(record, 7),
            number_at(record, 8),
            shift,
            tl.program_id(2),
            tl.num_programs(2),
            number_at(record, 11),
            V_BLOCK,
            BITS,
            SAMPLE,
            BLOCK,
            LAST,
        )


@triton.jit
def _orders_each(records_ptr, FIELDS: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """grid: (blocks of rows, tables)."""
    record = records_ptr + tl.program_id(1) * FIELDS
    n_rows = number_at(record, 6)
    if tl.program_id(0) * BLOCK < _live_rows(record):
        store_order(own_at(record, 3), own_at(record, 4), n_rows, 0, LAST, STEP, BLOCK)


@triton.jit
def _tiles_each(records_ptr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr):
    """grid: (pairs of tiles, tables, 1)."""
    record = records_ptr + tl.program_id(1) * FIELDS
    n_rows = number_at(record, 6)
    n_pairs = tl.cdiv(n_rows, 2 * BLOCK_M)
    if tl.program_id(0) < n_pairs:
        store_tiles(
            pointer_at(record, 0),
            pointer_at(record, 1),
            pointer_at(record, 4),
            pointer_at(record, 2),
            own_at(record, 5),
            n_rows,
            number_at(record, 7),
            number_at(record, 8),
            n_pairs,
            tl.program_id(2),
            tl.num_programs(2),
            number_at(record, 10),
            BLOCK_M,
        )


masks_kernel = register(_masks_each)
keys_kernel = register(_keys_each)
orders_kernel = register(_orders_each)
tiles_kernel = register(_tiles_each)


def room_for_records(tables: int) -> int:
    """Numbers that a captured `tile_batch` of so many tables sends, see `uploads_later`."""
    return tables * FIELDS


def tile_batch(tables: Sequence[NeighborTable], target: Target) -> list[TileList]:
    """Tiles of every table in mask order: what `tile_packing.pack_tiles` makes of each."""
    indices = [i for i, table in enumerate(tables) if table.n_rows > 0]
    # Tables with kernels of like size share a form of the keys' kernel.
    indices.sort(key=lambda i: offset_block(tables[i].n_offsets))
    if len(indices) < 2 or sum(tables[i].n_rows for i in indices) > _LAST:
        indices = []
    tiles = dict(zip(indices, _together([tables[i] for i in indices], target), strict=True))
    return [
        tiles[i] if i in tiles else pack_tiles(table, mask_order(table, target), target)
        for i, table in enumerate(tables)
    ]


def _together(tables: Sequence[NeighborTable], target: Target) -> list[TileList]:
    """The same of two or more, ordered by `offset_block`."""
    if not tables:
        return []
    device = tables[0].device
    # An order begins at a multiple of 16 bytes.
    starts = list(itertools.accumulate((cdiv(table.n_rows, 4) * 4 for table in tables), initial=0))
    large = max([table.n_rows for table in tables]) > ordering.FEW_ROWS
    if large:  # nothing may lie between the keys of one sort
        starts = list(itertools.accumulate((table.n_rows for table in tables), initial=0))
    bits, number = _bits(tables), (len(tables) - 1).bit_length()
    dtype = torch.int64 if large and bits + number > 31 else torch.int32
    words = [_mask_words(table) for table in tables]
    orders_at = sum(words) + cdiv(starts[-1], 4) * dtype.itemsize
    scratch = torch.empty(orders_at + starts[-1], dtype=torch.int32, device=device)
    keys = Part(scratch, sum(words), (starts[-1],), dtype)
    orders = Part(scratch, orders_at, (starts[-1],))
    at, width = scratch.data_ptr(), dtype.itemsize
    tiles: list[TileList] = []
    records: list[int] = []
    pairs = [cdiv(table.n_rows, 2 * TILE) for table in tables]
    sizes = [TileList.size(table.n_offsets, n) for table, n in zip(tables, pairs, strict=True)]
    memories = memories_for(sizes, device)
    for table, start, n_words, n_pairs, memory in zip(tables, starts, words, pairs, memories, strict=False):
        nbr, mask, count = table.own
        mask_at = at if mask is None else mask.data_ptr()
        records += (
            nbr.data_ptr(),
            mask_at,
            mask_at if count is None else count.data_ptr(),
            keys.at + width * start,
            orders.at + 4 * start,
            memory.data_ptr(),
            table.n_rows,
            count is not None,
            table.n_offsets,
            n_words > 0,
            start if large else 0,
            len(tiles),
        )
        at += 4 * n_words
        tiles.append(TileList(memory, table.n_offsets, n_pairs, table.n_rows))
    shift, addressed = bits if large else 0, [scratch, *(tile_list.memory for tile_list in tiles)]
    addressed += [memory_of(part) for table in tables for part in table.own if part is not None]
    _launch(tables, uploaded(records, device, addressed), words, (keys, shift), orders, target)
    return tiles


def _sort_into(orders: Part, keys: Part, bits: int) -> None:
    """Write the places of the keys, all below 2^bits, in ascending order; equal ones keep theirs."""
    own = keys.view()
    own.bits = bits  # type: ignore[attr-defined]  # a sort by digits, in programs without torch, needs no more of them
    orders.view().copy_(torch.sort(own, stable=True).indices)


def _bits(tables: Sequence[NeighborTable]) -> int:
    return max(rank_bits(table.n_offsets) for table in tables)


def _mask_words(table: NeighborTable) -> int:
    """Elements for the masks of a table that lacks them, a multiple of 16 bytes."""
    pitch = cdiv(table.n_rows, 4) * 4
    return 0 if table.own[1] is not None else grid_of(pitch, table.n_offsets)[1] * pitch


def _launch(
    tables: Sequence[NeighborTable],
    records: torch.Tensor,
    words: Sequence[int],
    keys: tuple[Part, int],
    orders: Part,
    target: Target,
) -> None:
    """words: elements for masks.  keys: and the bits below the table's where one sort is to give
    the orders, else 0."""
    device, count, most = records.device, len(tables), max([table.n_rows for table in tables])
    lacking = [table for table, size in zip(tables, words, strict=True) if size]
    if lacking:
        grids = [grid_of(table.n_rows, table.n_offsets) for table in lacking]
        grid = *[max(sizes) for sizes in zip(*grids, strict=True)][:2], count
        masks_kernel.launch(device, target, grid, (records,), (FIELDS, ROWS), OPTIONS, ())
    first, block, part = 0, ordering._KEY_BLOCK, ordering._PART
    key_part, shift = keys
    last = torch.iinfo(key_part.dtype).max
    shared = 8 * key_part.dtype.itemsize if shift else 0
    for v_block, group in itertools.groupby(tables, lambda table: offset_block(table.n_offsets)):
        rows = [table.n_rows for table in group]
        constants = (FIELDS, v_block, KEY_BITS, SAMPLE, block, last, shared)
        keys_kernel.launch(
            device,
            target,
            (cdiv(max(rows), block), len(rows), 1),
            (records, first, shift),
            constants,
            {"num_warps": 8},
            constants,
        )
        first += len(rows)
    if shift:
        _sort_into(orders, key_part, shift + (count - 1).bit_length())
    else:
        orders_kernel.launch(
            device, target, (cdiv(most, part), count, 1), (records,), (FIELDS, last, part, part), OPTIONS, ()
        )
    tiles_kernel.launch(device, target, (cdiv(most, 2 * TILE), count, 1), (records,), (FIELDS, TILE), OPTIONS, ())
