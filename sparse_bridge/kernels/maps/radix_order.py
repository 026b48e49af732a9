"""A stable order of keys, digit by digit: three launches a digit, the same order every time.

count_ptr, int32 [DIGITS, blocks]: keys of every block that have a digit; then, in its place, where the
first of them goes.  total_ptr, int32 [DIGITS]: keys of all blocks that have a digit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import alignment, cdiv, register
from ..runtime.target import Target

BITS = 4
_BLOCK = 512
_SCAN = 1024
OPTIONS = {"num_warps": 4}


@triton.jit
def _digits(key_ptr, order_ptr, n, shift, FIRST: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """(place, original place, whether it is there, [BLOCK, DIGITS] ones where a key has a digit)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = place < n
    row = place if FIRST else tl.load(order_ptr + place, mask=ok, other=0)
    key = tl.load(key_ptr + row, mask=ok, other=0)
    digit = ((key >> shift) & (DIGITS - 1)).to(tl.int32)
    ones = ((digit[:, None] == tl.arange(0, DIGITS)[None, :]) & ok[:, None]).to(tl.int32)
    return row, ok, digit, ones


@triton.jit(do_not_specialize=["n", "n_blocks", "shift"])
def _radix_count(
    key_ptr,
    order_ptr,
    count_ptr,
    total_ptr,
    n,
    n_blocks,
    shift,
    FIRST: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid: (blocks,). order [n]: keys in the order so far, int32; FIRST: the given one.  total: zeros before."""
    _row, _ok, _digit, ones = _digits(key_ptr, order_ptr, n, shift, FIRST, DIGITS, BLOCK)
    each, counts = tl.arange(0, DIGITS), tl.sum(ones, 0)
    tl.store(count_ptr + each * n_blocks + tl.program_id(0), counts)
    tl.atomic_add(total_ptr + each, counts)


@triton.jit(do_not_specialize=["n_blocks"])
def _radix_scan(count_ptr, total_ptr, n_blocks, DIGITS: tl.constexpr, SCAN: tl.constexpr):
    """grid: (DIGITS,). The sum of all counts before each, in its place."""
    digit, each = tl.program_id(0), tl.arange(0, DIGITS)
    before = tl.sum(tl.load(total_ptr + each, mask=each < digit, other=0), 0)
    for start in range(0, n_blocks, SCAN):
        at = start + tl.arange(0, SCAN)
        count = tl.load(count_ptr + digit * n_blocks + at, mask=at < n_blocks, other=0)
        tl.store(count_ptr + digit * n_blocks + at, before + tl.cumsum(count, 0) - count, mask=at < n_blocks)
        before += tl.sum(count, 0)


@triton.jit(do_not_specialize=["n", "n_blocks", "shift"])
def _radix_place(
    key_ptr,
    order_ptr,
    count_ptr,
    next_ptr,
    n,
    n_blocks,
    shift,
    FIRST: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid: (blocks,). next [n]: the order by this digit, int32 or int64."""
    row, ok, digit, ones = _digits(key_ptr, order_ptr, n, shift, FIRST, DIGITS, BLOCK)
    rank = tl.sum((tl.cumsum(ones, 0) - ones) * ones, 1)
    begin = tl.load(count_ptr + digit * n_blocks + tl.program_id(0), mask=ok, other=0)
    tl.store(next_ptr + begin + rank, row.to(next_ptr.dtype.element_ty), mask=ok)


count_kernel = register(_radix_count)
scan_kernel = register(_radix_scan)
place_kernel = register(_radix_place)


def radix_order(keys: torch.Tensor, order: torch.Tensor, bits: int, target: Target) -> torch.Tensor:
    """Write the places of keys [n] in ascending order, equal ones as they are given.

    keys: int32 or int64, contiguous, from 0 to 2^bits - 1; n at least 1 and below 2^31.  order: int32 or int64 [n],
    contiguous.
    """
    n, device, digits = keys.shape[0], keys.device, 1 << BITS
    n_blocks, passes = cdiv(n, _BLOCK), cdiv(bits, BITS)
    memory = torch.empty((2, n), dtype=torch.int32, device=device)
    counts = torch.empty(digits * n_blocks, dtype=torch.int32, device=device)
    totals = torch.zeros((passes, digits), dtype=torch.int32, device=device)
    for index in range(passes):
        total = totals[index]
        before, after = memory[index % 2], order if index + 1 == passes else memory[1 - index % 2]
        constants = (index == 0, digits, _BLOCK)
        numbers, aligned = (n, n_blocks, index * BITS), alignment(keys, before, counts, total, after)
        key = (constants, keys.dtype, after.dtype, aligned)
        grid, scans = (n_blocks, 1, 1), (digits, _SCAN)
        count_kernel.launch(device, target, grid, (keys, before, counts, total, *numbers), constants, OPTIONS, key)
        scan_key = alignment(counts, total)
        scan_kernel.launch(device, target, (digits, 1, 1), (counts, total, n_blocks), scans, OPTIONS, scan_key)
        place_kernel.launch(device, target, grid, (keys, before, counts, after, *numbers), constants, OPTIONS, key)
    return order
