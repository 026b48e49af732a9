"""A stable order of keys, digit by digit: three launches a digit, no atomics, the same order every time.

count_ptr, int32 [DIGITS, blocks]: keys of every block that have a digit; then, in its place, where the
first of them goes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..runtime.launch import alignment, cdiv, register
from ..runtime.target import Target

BITS = 4
_BLOCK = 512
_SCAN = 4096
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
    key_ptr, order_ptr, count_ptr, n, n_blocks, shift, FIRST: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):
    """grid: (blocks,). order [n]: keys in the order so far, int32; FIRST: the given one."""
    _row, _ok, _digit, ones = _digits(key_ptr, order_ptr, n, shift, FIRST, DIGITS, BLOCK)
    tl.store(count_ptr + tl.arange(0, DIGITS) * n_blocks + tl.program_id(0), tl.sum(ones, 0))


@triton.jit(do_not_specialize=["size"])
def _radix_scan(count_ptr, size, SCAN: tl.constexpr):
    """grid: (1,). The sum of all counts before each, in its place."""
    before = tl.zeros((), tl.int32)
    for start in range(0, size, SCAN):
        at = start + tl.arange(0, SCAN)
        count = tl.load(count_ptr + at, mask=at < size, other=0)
        tl.store(count_ptr + at, before + tl.cumsum(count, 0) - count, mask=at < size)
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
    for index in range(passes):
        before, after = memory[index % 2], order if index + 1 == passes else memory[1 - index % 2]
        constants = (index == 0, digits, _BLOCK)
        numbers, aligned = (n, n_blocks, index * BITS), alignment(keys, before, counts, after)
        key = (constants, keys.dtype, after.dtype, aligned)
        grid = (n_blocks, 1, 1)
        count_kernel.launch(device, target, grid, (keys, before, counts, *numbers), constants, OPTIONS, key)
        scan_kernel.launch(device, target, (1, 1, 1), (counts, digits * n_blocks), (_SCAN,), OPTIONS, alignment(counts))
        place_kernel.launch(device, target, grid, (keys, before, counts, after, *numbers), constants, OPTIONS, key)
    return order
