"""Row order for the masked dataflow: rows with alike offset masks become neighbours, so that a tile
skips offsets. Rows are ordered by the key of `gray_rank`.

Mask splits (TorchSparse++): the offsets are cut into ranges, part p of S from offset p * V // S on,
with masks of those, and every part has its own order of all rows. Row r of part p is called
p * N + r. Less of a tile's work is for nothing, and each row has S partial sums.

Kernels: mask_ptr int32 [parts * W, N]; key_ptr [parts * N] of the keys' dtype, written by
`store_keys`; order_ptr int32 [parts * N], written by `store_order`; count_ptr int32 [1], the rows in
use less one, read where `counted` is not 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import KernelError
from ..runtime.launch import cdiv, register
from ..runtime.target import Target
from .coord_key import live_rows
from .gray_rank import KEY_BITS, SAMPLE, gray_rank, key_bits, offset_block, rank_bits
from .mask_kernels import part_masks, part_start
from .neighbor_table import NeighborTable
from .tile_list import TILE

FEW_ROWS = 4 << 10  # up to which a row's place is counted, in one launch
_KEY_BLOCK = 1024
_PART = 64  # rows whose place one program finds


@triton.jit
def store_keys(
    mask_ptr,
    count_ptr,
    key_ptr,
    n_rows,
    counted,
    n_offsets,
    part_shift,
    part,
    parts,
    group,
    V_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):
    """The keys of a block of rows of a part, see `_order_key`. group: of the rows that a sort keeps
    together."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = part_start(part + 1, n_offsets, parts) - part_start(part, n_offsets, parts)
    mask_ptr = part_masks(mask_ptr, part, parts, n_rows, n_offsets)
    live = live_rows(count_ptr, n_rows, counted)
    last = tl.where(part_shift > 0, ((group + 1).to(tl.int64) << part_shift) - 1, LAST)
    last = last.to(key_ptr.dtype.element_ty)
    target = key_ptr + part * n_rows.to(tl.int64) + row
    if tl.program_id(0) * BLOCK < live:
        bit_of = key_bits(mask_ptr, live, n_rows, own, parts, V_BLOCK, BITS, SAMPLE)
        key = gray_rank(mask_ptr, row, live, n_rows, own, parts, bit_of, V_BLOCK, BITS)
        key = key.to(key_ptr.dtype.element_ty)
        above = tl.where(part_shift > 0, group.to(tl.int64) << part_shift, 0)
        tl.store(target, tl.where(row < live, key | above.to(key.dtype), last), mask=row < n_rows)
    else:
        tl.store(target, tl.zeros((BLOCK,), key_ptr.dtype.element_ty) + last, mask=row < n_rows)


@triton.jit(do_not_specialize=["count_ptr", "n_rows", "counted", "n_offsets", "part_shift"])
def _order_key(
    mask_ptr,
    count_ptr,
    key_ptr,
    n_rows,
    counted,
    n_offsets,
    part_shift,
    V_BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):
    """grid: (blocks of rows, parts). Sort key of every row of every part; the part's largest for
    rows that are not in use. part_shift: bits below that of the part, the most significant; 0 where
    parts are not sorted together.
    """
    store_keys(
        mask_ptr,
        count_ptr,
        key_ptr,
        n_rows,
        counted,
        n_offsets,
        part_shift,
        tl.program_id(1),
        tl.num_programs(1),
        tl.program_id(1),
        V_BLOCK,
        BITS,
        SAMPLE,
        BLOCK,
        LAST,
    )


@triton.jit
def store_order(key_ptr, order_ptr, n_rows, above, LAST: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """The places of a block of rows of the part that begins at row `above`, see `_order_few`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key_ptr += above
    key = tl.load(key_ptr + row, mask=row < n_rows, other=LAST)
    rank = tl.zeros((STEP, BLOCK), tl.int32)
    for start in range(0, n_rows, STEP):
        other = start + tl.arange(0, STEP)
        its = tl.load(key_ptr + other, mask=other < n_rows, other=LAST)[:, None]
        tied = (its == key[None, :]) & (other[:, None] < row[None, :])
        rank += ((its < key[None, :]) | tied).to(tl.int32)
    tl.store(order_ptr + above + tl.sum(rank, 0), above + row, mask=row < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _order_few(key_ptr, order_ptr, n_rows, LAST: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """grid: (blocks of rows, parts). Sort each part by key, stably: a row's place is the number of
    rows before it. Rows of a part are called as `order` names them.

    Comparing all pairs of rows compiles in a fifth of the time that a sorting network takes.
    """
    store_order(key_ptr, order_ptr, n_rows, tl.program_id(1) * n_rows, LAST, STEP, BLOCK)


key_kernel = register(_order_key)
few_kernel = register(_order_few)


def mask_order(table: NeighborTable, target: Target, splits: int = 1) -> torch.Tensor:
    """Rows of `table` in mask order, [splits * N], part by part: int32 up to FEW_ROWS rows, int64 above.

    Rows with equal masks keep their order. splits: at most as many as offsets. What counts are the rows
    in use. Makes the table's masks where it has none. Raises KernelError where the rows of all splits
    are 2^31 or more.

    Few rows are sorted in one launch, where `torch.sort` takes ten.
    """
    n_offsets, n_rows, device = table.n_offsets, table.n_rows, table.device
    _check_rows(n_rows, splits)
    mask = table.masks(target, splits)
    row_count = table.own[2]
    few, counted = n_rows <= FEW_ROWS, row_count is not None
    count, most = mask if row_count is None else row_count, cdiv(n_offsets, splits)
    dtype, part_shift = _key_type(most, few, counted, splits)
    last = torch.iinfo(dtype).max
    key = torch.empty(splits * n_rows, dtype=dtype, device=device)
    constants = (offset_block(most), KEY_BITS, SAMPLE, _KEY_BLOCK, last)
    key_kernel.launch(
        device,
        target,
        (cdiv(n_rows, _KEY_BLOCK), splits, 1),
        (mask, count, key, n_rows, int(counted), n_offsets, part_shift),
        constants,
        {"num_warps": 8},
        (constants, dtype),
    )
    if not few:
        return torch.sort(key, stable=True).indices
    order = torch.empty(splits * n_rows, dtype=torch.int32, device=device)
    few_kernel.launch(
        device,
        target,
        (cdiv(n_rows, _PART), splits, 1),
        (key, order, n_rows),
        (last, _PART, _PART),
        {"num_warps": 4},
        (),
    )
    return order


def _check_rows(n_rows: int, splits: int) -> None:
    if splits * (n_rows + 2 * TILE) >= 1 << 31:  # tiles are filled up
        raise KernelError(
            f"{splits} orders of {n_rows} rows; the rows of all must be fewer than 2^31. Use fewer "
            "mask splits, or smaller batches."
        )


def _key_type(most: int, few: bool, counted: bool, splits: int) -> tuple[torch.dtype, int]:
    """(dtype of sort keys, bits below that of the part). Radix sorts cost by the key's bytes: few
    offsets take a narrow one.

    most: offsets of a part.  counted: the host does not know how many rows are in use.
    """
    if few:
        return torch.int32, 0
    shift = rank_bits(most, splits)
    bits = shift + (splits - 1).bit_length()
    narrow = () if counted else ((8, torch.uint8), (15, torch.int16))
    wide = torch.int32 if bits <= 31 else torch.int64
    dtype = next((key_dtype for limit, key_dtype in narrow if bits <= limit), wide)
    return dtype, shift if splits > 1 else 0
