"""Orders and tiles of several tables, side by side in one launch of each kernel.

A table of few rows keeps few multiprocessors busy, and every launch costs the host as much as one
for a large table. What the kernels of `mask_order` take as arguments is read here from a record of
the table, which the grid's second axis numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, register
from ..runtime.target import Target, uploaded
from . import mask_order as ordering
from .gray_rank import DENSE, KEY_BITS, SAMPLE, offset_block
from .mask_order import mask_order, pack_tiles, sort_chunk, store_keys, store_tiles
from .neighbor_table import OPTIONS, ROWS, NeighborTable, grid_of, store_table_masks
from .tile_list import TILE, TileList

_LAST = torch.iinfo(torch.int32).max
# Of a record, int64: addresses of nbr, masks, count, keys, order, tiles; rows, counted, offsets,
# whether the masks are still to be made.
FIELDS = 10


@triton.jit
def _pointer(record_ptr, field):
    return tl.load(record_ptr + field).to(tl.pointer_type(tl.int32))


@triton.jit
def _own(record_ptr, field):
    """Address of memory that was taken for this."""
    return tl.multiple_of(_pointer(record_ptr, field), 16)


@triton.jit
def _number(record_ptr, field):
    return tl.load(record_ptr + field).to(tl.int32)


@triton.jit
def _masks_each(records_ptr, FIELDS: tl.constexpr):
    """grid: (blocks of rows, words, tables)."""
    record = records_ptr + tl.program_id(2) * FIELDS
    n_rows, n_offsets = _number(record, 6), _number(record, 8)
    there = (tl.program_id(0) * 32 < n_rows) & (tl.program_id(1) * 32 < n_offsets)
    if there & (_number(record, 9) != 0):
        store_table_masks(_pointer(record, 0), _pointer(record, 1), n_rows, 0, n_offsets)


@triton.jit(do_not_specialize=["first"])
def _keys_each(
    records_ptr, first, FIELDS: tl.constexpr, V_BLOCK: tl.constexpr, BITS: tl.constexpr,
    DENSE: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """grid: (blocks of rows, tables from `first` on, 1)."""
    record = records_ptr + (first + tl.program_id(1)) * FIELDS
    n_rows = _number(record, 6)
    if tl.program_id(0) * BLOCK < n_rows:
        store_keys(
            _pointer(record, 1), _pointer(record, 2), _own(record, 3), n_rows, _number(record, 7),
            _number(record, 8), 0, 0, tl.program_id(2), tl.num_programs(2), V_BLOCK, BITS, DENSE,
            SAMPLE, BLOCK, CHUNK, LAST,
        )  # fmt: skip


@triton.jit
def _chunks_each(
    records_ptr, FIELDS: tl.constexpr, CHUNK: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grid: (blocks of rows, tables)."""
    record = records_ptr + tl.program_id(1) * FIELDS
    n_rows = _number(record, 6)
    if tl.program_id(0) * BLOCK < n_rows:
        sort_chunk(_own(record, 3), _own(record, 4), n_rows, 0, CHUNK, LAST, STEP, BLOCK)


@triton.jit
def _tiles_each(records_ptr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr):
    """grid: (pairs of tiles, tables, 1)."""
    record = records_ptr + tl.program_id(1) * FIELDS
    n_rows = _number(record, 6)
    n_pairs = tl.cdiv(n_rows, 2 * BLOCK_M)
    if tl.program_id(0) < n_pairs:
        store_tiles(
            _pointer(record, 0), _pointer(record, 1), _own(record, 4), _pointer(record, 2),
            _own(record, 5), n_rows, _number(record, 7), _number(record, 8), n_pairs,
            tl.program_id(2), tl.num_programs(2), BLOCK_M,
        )  # fmt: skip


masks_kernel = register(_masks_each)
keys_kernel = register(_keys_each)
chunks_kernel = register(_chunks_each)
tiles_kernel = register(_tiles_each)


def tile_batch(tables: Sequence[NeighborTable], target: Target) -> list[TileList]:
    """Tiles of every table in mask order, the same as `pack_tiles` of `mask_order` makes of each.

    Those of more than `SORTED_APART` rows, whose keys are sorted as a whole, go one by one.
    """
    places = [i for i, one in enumerate(tables) if 0 < one.n_rows <= ordering.SORTED_APART]
    if len(places) < 2:
        places = []
    # Tables with kernels of like size share a form of the keys' kernel.
    places.sort(key=lambda i: offset_block(tables[i].n_offsets))
    made = dict(zip(places, _small([tables[i] for i in places], target), strict=True))
    return [
        made[i] if i in made else pack_tiles(one, mask_order(one, target), target)
        for i, one in enumerate(tables)
    ]


def _small(tables: Sequence[NeighborTable], target: Target) -> list[TileList]:
    """The same of tables of few rows, ordered by `offset_block`."""
    if not tables:
        return []
    device = tables[0].nbr.device
    shapes = [(one.n_offsets, one.n_rows) for one in tables]
    sizes = [_scratch(*shape, one.mask is None) for shape, one in zip(shapes, tables, strict=True)]
    scratch = torch.empty(sum(map(sum, sizes)), dtype=torch.int32, device=device)
    at, made, held = scratch.data_ptr(), [], [scratch]
    records: list[int] = []
    for one, (n_offsets, n_rows), (keys, orders, masks) in zip(tables, shapes, sizes, strict=True):
        n_pairs = cdiv(n_rows, 2 * TILE)
        memory = scratch.new_empty(TileList.size(n_offsets, n_pairs))
        mask = at + 4 * (keys + orders) if one.mask is None else one.mask.data_ptr()
        records += (
            one.nbr.data_ptr(), mask, mask if one.count is None else one.count.data_ptr(), at,
            at + 4 * keys, memory.data_ptr(), n_rows, one.count is not None, n_offsets, masks > 0,
        )  # fmt: skip
        at += 4 * (keys + orders + masks)
        made.append(TileList(memory, n_offsets, n_pairs, n_rows))
        held += (memory, one.nbr)
        held += [part for part in (one.mask, one.count) if part is not None]
    lacking = max(
        (n_rows for (_, n_rows), size in zip(shapes, sizes, strict=True) if size[2]), default=0
    )
    _launch(shapes, uploaded(records, device, held), lacking, target)
    return made


def _scratch(n_offsets: int, n_rows: int, masks: bool) -> tuple[int, int, int]:
    """Elements for keys, order and masks, which start at multiples of 16 bytes."""
    pitch = cdiv(n_rows, 4) * 4
    return pitch, pitch, grid_of(pitch, n_offsets)[1] * pitch if masks else 0


def _launch(
    shapes: Sequence[tuple[int, int]], records: torch.Tensor, lacking: int, target: Target
) -> None:
    """shapes: of the tables.  lacking: rows of the largest one that lacks masks."""
    device, count = records.device, len(shapes)
    n_rows = max(rows for _, rows in shapes)
    if lacking:
        words = cdiv(max(n_offsets for n_offsets, _ in shapes), 32)
        grid = (cdiv(lacking, ROWS), words, count)
        masks_kernel.launch(device, target, grid, (records,), (FIELDS,), OPTIONS, ())
    first, block, chunk, part = 0, ordering._KEY_BLOCK, ordering._CHUNK, ordering._PART
    while first < count:
        v_block, end = offset_block(shapes[first][0]), first + 1
        while end < count and offset_block(shapes[end][0]) == v_block:
            end += 1
        constants = (FIELDS, v_block, KEY_BITS, DENSE, SAMPLE, block, chunk, _LAST)
        keys_kernel.launch(
            device, target, (cdiv(n_rows, block), end - first, 1), (records, first), constants,
            {"num_warps": 8}, constants,
        )  # fmt: skip
        first = end
    chunks_kernel.launch(
        device, target, (cdiv(n_rows, part), count, 1), (records,),
        (FIELDS, chunk, _LAST, part, part), OPTIONS, chunk,
    )  # fmt: skip
    tiles_kernel.launch(
        device, target, (cdiv(n_rows, 2 * TILE), count, 1), (records,), (FIELDS, TILE), OPTIONS, ()
    )
