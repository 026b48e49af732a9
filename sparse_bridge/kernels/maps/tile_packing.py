"""Packing: a neighbour table permuted into tiles in the row order of `mask_order`, with the offsets
that are live in each, and the pair lists of such tiles.

Kernels: nbr_ptr int32 [V, N]; mask_ptr int32 [parts * W, N]; order_ptr int32 or int64 [parts * N];
tiles_ptr the memory of a `TileList`, int32, written by `store_tiles`. packed_ptr, rows_ptr and
counts_ptr are views of it; ends_ptr int64 [n_lists, n_pairs]; in_ptr and out_ptr int32 [P], written
by `store_pairs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, register
from ..runtime.target import Target
from .coord_key import live_rows
from .mask_kernels import part_masks, part_start
from .neighbor_table import NeighborTable
from .tile_list import TILE, TileList


@triton.jit
def _list_live(live, slot, v, list_ptr, tile, n_offsets):
    """Write the offsets v that are `live` to their slots of the tile's list."""
    tl.store(list_ptr + tile.to(tl.int64) * n_offsets + slot, v, mask=live > 0)


@triton.jit
def store_tiles(
    nbr_ptr,
    mask_ptr,
    order_ptr,
    count_ptr,
    tiles_ptr,
    n_rows,
    counted,
    n_offsets,
    n_pairs,
    part,
    parts,
    base,
    BLOCK_M: tl.constexpr,
):
    """A pair of tiles of a part, see `_pack_tiles`. base: what the order calls row 0."""
    start = part_start(part, n_offsets, parts)
    end = part_start(part + 1, n_offsets, parts)
    mask_ptr = part_masks(mask_ptr, part, parts, n_rows, n_offsets)
    pair = part * n_pairs + tl.program_id(0)
    pitch = n_pairs.to(tl.int64) * 2 * BLOCK_M
    rows_ptr = tiles_ptr
    packed_ptr = rows_ptr + pitch * parts
    live_ptr = packed_ptr + pitch * (n_offsets + parts - 1)
    quads = (n_pairs.to(tl.int64) * parts + 3) // 4 * 4  # what follows starts at 16 bytes
    live2_ptr = live_ptr + quads * 2 * n_offsets
    n_live_ptr = live2_ptr + quads * n_offsets
    n_live2_ptr = n_live_ptr + quads * 2
    counts_ptr = n_live2_ptr + quads
    lane = tl.arange(0, 2 * BLOCK_M)
    offs_m = tl.program_id(0) * 2 * BLOCK_M + lane
    live = live_rows(count_ptr, n_rows, counted)
    above = part * n_rows
    named = tl.load(order_ptr + above + offs_m, mask=offs_m < live, other=0).to(tl.int32)
    named = tl.where(offs_m < live, named - base, -1)
    tl.store(rows_ptr + part * pitch + offs_m, named)
    row = tl.where(named >= 0, named - above, -1)
    first = 0
    second = 0
    both = 0
    # Tiles of no rows need their counts, which are 0, and nothing else.
    words = tl.where(tl.program_id(0) * 2 * BLOCK_M < live, (end - start + 31) // 32, 0)
    for least in range(tl.where(words > 0, end, start), end, 32):
        absent = least + tl.arange(0, 32)
        empty = counts_ptr + absent.to(tl.int64) * n_pairs + tl.program_id(0)
        tl.store(empty, tl.zeros((32,), tl.int32), mask=absent < end)
    for word in range(words):
        bit = tl.arange(0, 32)
        v1 = start + word * 32 + bit
        v = v1[:, None]
        bits = tl.load(mask_ptr + word * n_rows.to(tl.int64) + row, mask=row >= 0, other=0)
        inside = ((bits[None, :] >> bit[:, None]) & 1) != 0  # few are present in a sparse map
        value = tl.load(nbr_ptr + v.to(tl.int64) * n_rows + row[None, :], mask=inside, other=-1)
        hit = (value >= 0).to(tl.int32)
        hits = tl.sum(tl.where(lane[None, :] < BLOCK_M, hit, hit << 16), 1)
        low = ((hits & 0xFFFF) > 0).to(tl.int32)
        high = ((hits >> 16) > 0).to(tl.int32)
        either = low | high
        marks = low | (high << 8) | (either << 16)
        slot = tl.cumsum(marks, 0) - marks
        # Nobody reads an offset of a pair of tiles that lacks it.
        tl.store(
            packed_ptr + (v + part) * pitch + offs_m[None, :],
            value,
            mask=(either[:, None] > 0) & (offs_m[None, :] >= 0),
        )
        total = (hits & 0xFFFF) + (hits >> 16)
        counts = counts_ptr + v1.to(tl.int64) * n_pairs + tl.program_id(0)
        tl.store(counts, total, mask=v1 < end)
        _list_live(low, first + (slot & 0xFF), v1, live_ptr, 2 * pair, n_offsets)
        _list_live(high, second + ((slot >> 8) & 0xFF), v1, live_ptr, 2 * pair + 1, n_offsets)
        _list_live(either, both + (slot >> 16), v1, live2_ptr, pair, n_offsets)
        added = tl.sum(marks, 0)
        first += added & 0xFF
        second += (added >> 8) & 0xFF
        both += added >> 16
    tl.store(n_live_ptr + 2 * pair, first)
    tl.store(n_live_ptr + 2 * pair + 1, second)
    tl.store(n_live2_ptr + pair, both)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted", "n_offsets", "n_pairs"])
def _pack_tiles(
    nbr_ptr, mask_ptr, order_ptr, count_ptr, tiles_ptr, n_rows, counted, n_offsets, n_pairs, BLOCK_M: tl.constexpr
):
    """grid: (n_pairs pairs of tiles, parts). Permute the table into tile order, list the offsets
    that are live in each tile and each pair of tiles, and count the entries of every offset in each
    pair. tiles: laid out as `TileList`.

    Sums and running sums of both tiles are taken at once, in parts of one word.
    """
    store_tiles(
        nbr_ptr,
        mask_ptr,
        order_ptr,
        count_ptr,
        tiles_ptr,
        n_rows,
        counted,
        n_offsets,
        n_pairs,
        tl.program_id(1),
        tl.num_programs(1),
        0,
        BLOCK_M,
    )


@triton.jit
def store_pairs(
    packed_ptr,
    rows_ptr,
    ends_ptr,
    counts_ptr,
    in_ptr,
    out_ptr,
    n_lists,
    n_pairs,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pairs of the lists program_id(1), + num_programs(1), .. in PAIRS pairs of tiles, of `BLOCK` places each."""
    lane = tl.arange(0, PAIRS * BLOCK)
    first = tl.program_id(0) * PAIRS
    pair = first + lane // BLOCK
    offs_m = first * BLOCK + lane
    pitch = n_pairs.to(tl.int64) * BLOCK
    for v in range(tl.program_id(1), n_lists, tl.num_programs(1)):
        blocks = n_pairs.to(tl.int64) * v
        # Nobody writes an offset of a pair of tiles that lacks it.
        present = tl.load(counts_ptr + blocks + pair, mask=pair < n_pairs, other=0) > 0
        value = tl.load(packed_ptr + pitch * v + offs_m, mask=present, other=-1)
        hit = (value >= 0).to(tl.int32)
        row = tl.load(rows_ptr + offs_m, mask=value >= 0, other=0)
        begin = tl.load(ends_ptr + blocks + first) - tl.load(counts_ptr + blocks + first)
        slot = begin + tl.cumsum(hit, 0) - hit
        tl.store(in_ptr + slot, value, mask=value >= 0)
        tl.store(out_ptr + slot, row, mask=value >= 0)


@triton.jit(do_not_specialize=["n_lists", "n_pairs"])
def _compact_pairs(
    packed_ptr,
    rows_ptr,
    ends_ptr,
    counts_ptr,
    in_ptr,
    out_ptr,
    n_lists,
    n_pairs,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid: (blocks of pairs of tiles, lists or less). Pair lists by offset, then place. ends: inclusive running sum
    of counts [n_lists, n_pairs], int64."""
    store_pairs(packed_ptr, rows_ptr, ends_ptr, counts_ptr, in_ptr, out_ptr, n_lists, n_pairs, PAIRS, BLOCK)


PAIRS = 4  # pairs of tiles whose entries a program lists
MOST_LISTS = 1 << 15  # programs side by side along a grid's second axis, which ends at 65,535

pack_kernel = register(_pack_tiles)
compact_kernel = register(_compact_pairs)


def pack_tiles(table: NeighborTable, order: torch.Tensor, target: Target, splits: int = 1) -> TileList:
    """Tiles of `table` in the row order `order` (int32 or int64 [splits * N])."""
    n_offsets, n_rows, (nbr, _, count) = table.n_offsets, table.n_rows, table.own
    n_pairs = cdiv(n_rows, 2 * TILE)
    size = TileList.size(n_offsets, n_pairs, splits)
    memory = torch.empty(size, dtype=torch.int32, device=order.device)
    masks = table.masks(target, splits)
    pack_kernel.launch(
        order.device,
        target,
        (n_pairs, splits, 1),
        (
            nbr,
            masks,
            order,
            masks if count is None else count,
            memory,
            n_rows,
            int(count is not None),
            n_offsets,
            n_pairs,
        ),
        (TILE,),
        {"num_warps": 4},
        order.dtype,
    )
    return TileList(memory, n_offsets, n_pairs, n_rows, splits)


def compact_pairs(
    tiles: TileList, n_lists: int, target: Target, room: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pair lists of the first `n_lists` offsets, ordered by offset, then place in the tiles, which
    have one order for all offsets.

    Returns (table entries int32 [P], table rows int32 [P], starts int64 [n_lists + 1]), all on the
    device. Waits for it once, to learn P; not with `room` for more pairs than there can be: then P is
    `room`, and what lies behind the last pair is not written.
    """
    counts, n_pairs = tiles.counts[:n_lists], tiles.n_pairs
    ends = counts.reshape(-1).cumsum(0, dtype=torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends.view(n_lists, n_pairs)[:, -1]])
    total = int(starts[-1]) if room is None else room
    entries, rows = counts.new_empty(total), counts.new_empty(total)
    if total:
        write_pairs(tiles, ends, counts, entries, rows, n_lists, target)
    return entries, rows, starts


def write_pairs(
    tiles: TileList,
    ends: torch.Tensor,
    counts: torch.Tensor,
    entries: torch.Tensor,
    rows: torch.Tensor,
    n_lists: int,
    target: Target,
) -> None:
    """Fill the lists `entries` and `rows`, int32 [P]. ends: int64 [n_lists * n_pairs], the inclusive running
    sum of counts; counts: int32 [n_lists, n_pairs], of the first offsets of `TileList.counts`."""
    compact_kernel.launch(
        counts.device,
        target,
        (cdiv(tiles.n_pairs, PAIRS), min(n_lists, MOST_LISTS), 1),
        (tiles.packed, tiles.rows, ends, counts, entries, rows, n_lists, tiles.n_pairs),
        (PAIRS, 2 * TILE),
        {"num_warps": 4},
        (),
    )
