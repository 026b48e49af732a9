"""Kernels that make the masks of neighbour tables.

nbr_ptr and mask_ptr are nbr int32 [V, N] and mask int32 [W, N] of a `NeighborTable`. `store_mask` and
`store_table_masks` write words of the masks; `part_masks` gives the pointer to those of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.launch import register


@triton.jit
def store_mask(value, mask_ptr, n_rows, ROWS: tl.constexpr):
    """The mask words of ROWS rows from a [32, ROWS] block of table entries."""
    bit = tl.arange(0, 32)[:, None]
    word = tl.sum((value >= 0).to(tl.int32) << bit, 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(mask_ptr + tl.program_id(1).to(tl.int64) * n_rows + row, word, mask=row < n_rows)


@triton.jit
def part_start(part, n_offsets, parts):
    """The first offset of a part, where they are cut into `parts` ranges."""
    return part * n_offsets // parts


@triton.jit
def part_masks(mask_ptr, part, parts, n_rows, n_offsets):
    """Where the masks of a part begin."""
    most = tl.cdiv(n_offsets, parts)
    return mask_ptr + (part * tl.cdiv(most, 32)) * n_rows.to(tl.int64)


@triton.jit
def store_table_masks(nbr_ptr, mask_ptr, n_rows, start, end, ROWS: tl.constexpr):
    """Masks of ROWS rows of an existing table by a word of the offsets from `start` to `end`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    v = start + tl.program_id(1) * 32 + tl.arange(0, 32)[:, None]
    inside = (row < n_rows) & (v < end)
    value = tl.load(nbr_ptr + v.to(tl.int64) * n_rows + row, mask=inside, other=-1)
    store_mask(value, mask_ptr, n_rows, ROWS)


@triton.jit(do_not_specialize=["n_rows", "n_offsets"])
def _table_masks(nbr_ptr, mask_ptr, n_rows, n_offsets, ROWS: tl.constexpr):
    """Masks of an existing table, in parts: grid axis 2."""
    part, parts = tl.program_id(2), tl.num_programs(2)
    start, end = part_start(part, n_offsets, parts), part_start(part + 1, n_offsets, parts)
    mask_ptr += (part * tl.num_programs(1)) * n_rows.to(tl.int64)
    store_table_masks(nbr_ptr, mask_ptr, n_rows, start, end, ROWS)


masks_kernel = register(_table_masks)
