"""New coordinates in the order of their keys: by batch, then by the axes from the last to the
first or from the first to the last; and the hash table's values, renamed to follow.

Keys are row-major indices in the bounds of the coordinates, with the batch column first and the
axes after it in that order: int32 wherever those of the table are, which halves the work of a radix
sort. No two rows have one key, so the rank of a row is the number of smaller keys. Of few rows that
is counted, in the launch that moves them; `torch.sort` takes ten launches. Rows behind those in use
keep their places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import cdiv, register
from ..runtime.parts import Operand, Part, Slab
from ..runtime.target import Target
from .coord_key import live_rows
from .hash_kernels import value_at
from .hash_table import HashTable
from .neighbor_table import OPTIONS

# Up to which ranks are counted: every row is compared with all. H200, all launches, us with ranks
# counted / by torch.sort: int32 keys of 8k rows 24 / 52, 16k 50 / 56, 32k 131 / 54; int64 27 / 83,
# 61 / 88, 184 / 82; the host 50 / 80 to 190. Comparisons end with the rows in use.
FEW_ROWS = 16 << 10
_BLOCK = 256  # rows per program that does little with each
_SLOTS = 1024  # of the table, per program
_RANKED = 32  # rows whose ranks one program counts,
_STEP = 128  # by so many keys at once


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted", "first", "turn"])
def _sort_keys(
    coords_ptr,
    bounds_ptr,
    count_ptr,
    key_ptr,
    n_rows,
    counted,
    first,
    turn,
    D: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The keys of rows, of the type that takes them; LAST, that type's largest number, for those
    that are not in use. The columns of axes follow from `first` by `turn`, 1 or -1. (Numbers, no
    constexpr: one form serves both orders.)"""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = row < live_rows(count_ptr, n_rows, counted)
    key_dtype = key_ptr.dtype.element_ty
    base = coords_ptr + row.to(tl.int64) * (D + 1)
    key = (tl.load(base, mask=used, other=0) - tl.load(bounds_ptr)).to(key_dtype)
    for i in tl.static_range(D):
        column = first + turn * i
        c = tl.load(base + column, mask=used, other=0)
        index = c - tl.load(bounds_ptr + 2 * column)
        key = key * tl.load(bounds_ptr + 2 * column + 1) + index.to(key_dtype)
    key = tl.where(used, key, tl.full((BLOCK,), LAST, key_dtype))
    tl.store(key_ptr + row, key, mask=row < n_rows)


@triton.jit
def _move(coords_ptr, sorted_ptr, renamed_ptr, row, rank, ok, D: tl.constexpr):
    """Put rows at their ranks, and tell the ranks of rows."""
    source = coords_ptr + row.to(tl.int64) * (D + 1)
    target = sorted_ptr + rank.to(tl.int64) * (D + 1)
    for column in tl.static_range(D + 1):
        tl.store(target + column, tl.load(source + column, mask=ok), mask=ok)
    tl.store(renamed_ptr + row, rank.to(tl.int32), mask=ok)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted"])
def _rank_few(
    key_ptr,
    coords_ptr,
    count_ptr,
    sorted_ptr,
    renamed_ptr,
    n_rows,
    counted,
    D: tl.constexpr,
    LAST: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move a block of rows to their ranks: the numbers of smaller keys, STEP of which are looked at
    together."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = live_rows(count_ptr, n_rows, counted)
    key = tl.load(key_ptr + row, mask=row < live, other=LAST)
    sign: tl.constexpr = 63 if LAST > 0xFFFFFFFF else 31
    below = tl.zeros((STEP, BLOCK), tl.int32)  # the number of smaller keys, negated
    for start in range(0, tl.where(tl.program_id(0) * BLOCK < live, live, 0), STEP):
        other = start + tl.arange(0, STEP)
        its = tl.load(key_ptr + other, mask=other < live, other=LAST)
        # -1 for a smaller key: keys are never negative, so that differences fit. NVIDIA's compiler
        # makes 106 instructions of this where a comparison takes 170 (int64: 147 and 211).
        below += ((its[:, None] - key[None, :]) >> sign).to(tl.int32)
    rank = tl.where(row < live, -tl.sum(below, 0), row)
    _move(coords_ptr, sorted_ptr, renamed_ptr, row, rank, row < n_rows, D)


@triton.jit(do_not_specialize=["n_rows"])
def _move_sorted(order_ptr, coords_ptr, sorted_ptr, renamed_ptr, n_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Move rows to their ranks. order: int64, the row of every rank."""
    rank = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rank < n_rows
    row = tl.load(order_ptr + rank, mask=ok, other=0)
    _move(coords_ptr, sorted_ptr, renamed_ptr, row, rank, ok, D)


@triton.jit(do_not_specialize=["values_ptr", "step", "capacity", "n_rows"])
def _rename_values(values_ptr, renamed_ptr, step, capacity, n_rows, BLOCK: tl.constexpr):
    """Values -2 - row become -2 - renamed[row]; -1 stays."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = value_at(values_ptr, slot, step)
    row = -2 - tl.load(address, mask=slot < capacity, other=-1)
    ok = (row >= 0) & (row < n_rows)
    tl.store(address, -2 - tl.load(renamed_ptr + row, mask=ok, other=0), mask=ok)


keys_kernel = register(_sort_keys)
few_kernel = register(_rank_few)
move_kernel = register(_move_sorted)
rename_kernel = register(_rename_values)


def scratch_elements(n_rows: int) -> int:
    """Elements of a slab that `sort_rows` takes at most."""
    keys = Slab.rounded(2 * n_rows) if n_rows <= FEW_ROWS else 0
    return keys + Slab.rounded(n_rows)


def sort_rows(
    table: HashTable,
    coords: torch.Tensor,
    bounds: Operand,
    target: Target,
    count: Operand | None = None,
    slab: Slab | None = None,
    ascending: bool = False,
) -> torch.Tensor:
    """Distinct coordinates int32 [N, 1 + D], contiguous, N > 0, by batch and then by the axes from
    the last to the first, or with `ascending` from the first to the last; `table` maps to their
    rows, afterwards as before.

    bounds: of the coordinates, see `coord_key`; keys of the table's width hold them.  count: int32,
    one less than the rows in use, which come first, if not all are; what is behind them stays
    there.  slab: for what nobody reads afterwards, `scratch_elements`.
    """
    n_rows, columns = coords.shape
    slab = Slab(scratch_elements(n_rows), table.device) if slab is None else slab
    key, renamed = _key_memory(slab, n_rows, table), slab.part(n_rows)
    count_operand, sizes = coords if count is None else count, (n_rows, int(count is not None))
    shape = (columns - 1, torch.iinfo(key.dtype).max)
    axes = (1, 1) if ascending else (columns - 1, -1)
    keys_kernel.launch(
        table.device,
        target,
        (cdiv(n_rows, _BLOCK), 1, 1),
        (coords, bounds, count_operand, key, *sizes, *axes),
        (*shape, _BLOCK),
        OPTIONS,
        (shape, coords.data_ptr() % 16),
    )
    moved = coords.new_empty(coords.shape)
    if isinstance(key, Part):
        few_kernel.launch(
            table.device,
            target,
            (cdiv(n_rows, _RANKED), 1, 1),
            (key, coords, count_operand, moved, renamed, *sizes),
            (*shape, _STEP, _RANKED),
            OPTIONS,
            (shape, coords.data_ptr() % 16),
        )
    else:
        order = torch.sort(key, stable=True).indices
        move_sorted(order, coords, moved, renamed, target)
    rename_values(table, renamed, n_rows, target)
    return moved


def _key_memory(slab: Slab, n_rows: int, table: HashTable) -> Operand:
    """For the keys of rows; a tensor where torch sorts them."""
    dtype = torch.int64 if table.key64 else torch.int32
    if n_rows > FEW_ROWS:
        return torch.empty(n_rows, dtype=dtype, device=table.device)
    words = slab.part(2 * n_rows if table.key64 else n_rows)
    return Part(words.memory, words.start, (n_rows,), dtype)


def move_sorted(
    order: torch.Tensor, coords: torch.Tensor, moved: torch.Tensor, renamed: Operand, target: Target
) -> None:
    """Write coords [N, 1 + D] in the order of the rows int64 [N], and renamed [N], the rank of
    every row."""
    n_rows, columns = coords.shape
    constants = (columns - 1, _BLOCK)
    move_kernel.launch(
        coords.device,
        target,
        (cdiv(n_rows, _BLOCK), 1, 1),
        (order, coords, moved, renamed, n_rows),
        constants,
        OPTIONS,
        (constants, coords.data_ptr() % 16),
    )


def rename_values(table: HashTable, renamed: Operand, n_rows: int, target: Target) -> None:
    """Have `table`, which maps to rows below `n_rows`, map to what `renamed` calls them."""
    rename_kernel.launch(
        table.device,
        target,
        (cdiv(table.capacity, _SLOTS), 1, 1),
        (table.own[1], renamed, table.step, table.capacity, n_rows),
        (_SLOTS,),
        OPTIONS,
        (),
    )
