"""The key that rows are ordered by: rank in a Gray code of a few bits that tell of the offset mask.

Gray order is FlexGEMM's. The bits and their order are ours: the most significant ones say on which
sides of a cubic kernel a row has any neighbours, the others which of its offsets it has, rarest
first. Offsets that every row has are left out. Where there are more offsets than bits, rare ones
share bits in pairs, and above 32 offsets all share with others of like frequency. On real scans
tiles need a tenth fewer offsets than under a code of all single ones, under strided kernels up to a
third.

mask_ptr: int32 [W, n_rows], bit v % 32 of word v // 32 = offset v, see `neighbor_table`. `key_bits`
gives int32 [V_BLOCK], `gray_rank` an int32 for each row of its block; both write no memory.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ..runtime.launch import power_of_2

KEY_BITS = 24  # leaves seven of an int32 for the number of a table
LEAST_OFFSETS = 32  # smaller kernels share one form
SAMPLE = 256  # rows that tell how frequent the offsets are
_CUBES = {27: 3, 125: 5, 343: 7}  # offsets: rows of them along an axis
_SIDES = 6


@functools.cache
def offset_block(n_offsets: int) -> int:
    """Offsets that a form of the kernels holds."""
    return max(LEAST_OFFSETS, power_of_2(n_offsets))


@functools.cache
def rank_bits(n_offsets: int, parts: int = 1) -> int:
    """Bits of the key under up to `n_offsets` offsets."""
    sides = _SIDES if n_offsets in _CUBES and parts == 1 else 0
    return min(sides + n_offsets, KEY_BITS)


@triton.jit
def _edge_of(n_offsets, parts):
    """Offsets along an axis of a cubic kernel in raster order, 0 of another one or of a part."""
    edge = tl.where(n_offsets == 27, 3, tl.where(n_offsets == 125, 5, 0))
    edge = tl.where(n_offsets == 343, 7, edge)
    return tl.where(parts == 1, edge, 0)


@triton.jit
def key_bits(mask_ptr, live, n_rows, n_offsets, parts, V_BLOCK: tl.constexpr, BITS: tl.constexpr, SAMPLE: tl.constexpr):
    """Which bit of the key each offset sets, -1 for none. How frequent each is, SAMPLE rows spread
    over the `live` ones tell."""
    u = tl.arange(0, V_BLOCK)
    width: tl.constexpr = 8192 // V_BLOCK if V_BLOCK < 8192 else 1
    spread = tl.maximum(live // SAMPLE, 1)
    sampled = tl.minimum(live, SAMPLE)
    total = tl.zeros((V_BLOCK,), tl.int32)
    for first in range(0, sampled, width):
        index = first + tl.arange(0, width)
        ok = (index < sampled)[None, :] & (u < n_offsets)[:, None]
        offs = (u // 32).to(tl.int64)[:, None] * n_rows + (index * spread)[None, :]
        word = tl.load(mask_ptr + offs, mask=ok, other=0)
        total += tl.sum((word >> (u % 32)[:, None]) & 1, 1)
    telling = (u < n_offsets) & (total < sampled)
    total = tl.where(telling, total, SAMPLE)  # what every row has comes last
    if V_BLOCK <= 64:
        other, mine, w = total[None, :], total[:, None], u[None, :]
        rarer = (other < mine) | ((other == mine) & (w < u[:, None]))
        rank = tl.sum(rarer.to(tl.int32), 1)
    else:
        rank = tl.zeros((V_BLOCK,), tl.int32)
        for w in range(n_offsets):
            other = tl.sum(tl.where(u == w, total, 0), 0)
            rank += ((other < total) | ((other == total) & (w < u))).to(tl.int32)
    count = tl.sum(telling.to(tl.int32), 0)
    room = tl.minimum(BITS - tl.where(_edge_of(n_offsets, parts) > 0, 6, 0), count)
    if V_BLOCK <= 32:
        bit = tl.maximum(rank // 2, rank - (count - room))
    else:
        bit = rank * room // tl.maximum(count, 1)
    return tl.where(telling, room - 1 - bit, -1)


@triton.jit
def _on_side(u, side, edge):
    """Whether offsets `u` of a cubic kernel lie on a side of its middle: 0 and 1 are the low and
    the high side along the last axis, and so on."""
    stride = tl.where(side < 2, 1, tl.where(side < 4, edge, edge * edge))
    at = u // stride % edge
    return tl.where(side % 2 == 0, at < edge // 2, at > edge // 2)


@triton.jit
def gray_rank(mask_ptr, row, live, n_rows, n_offsets, parts, bit_of, V_BLOCK: tl.constexpr, BITS: tl.constexpr):
    """int32 key of every row. bit_of: what `key_bits` returned."""
    u = tl.arange(0, V_BLOCK)
    edge = _edge_of(n_offsets, parts)
    sides = tl.where(edge > 0, 6, 0)
    key = tl.zeros_like(row)
    for w in range((n_offsets + 31) // 32):
        word = tl.load(mask_ptr + w * n_rows.to(tl.int64) + row, mask=row < live, other=0)
        for bit in range(tl.minimum(n_offsets - w * 32, 32)):
            shift = tl.sum(tl.where(u == w * 32 + bit, bit_of, 0), 0)
            if shift >= 0:
                key |= ((word >> bit) & 1) << shift
        for side in range(sides):
            mask_u = (u < n_offsets) & (u // 32 == w) & _on_side(u, side, edge)
            some = word & tl.sum(tl.where(mask_u, 1 << (u % 32), 0), 0)
            top = tl.minimum(n_offsets + 6, BITS) - 1
            key |= (some != 0).to(tl.int32) << (top - side)
    key ^= key >> 16
    key ^= key >> 8
    key ^= key >> 4
    key ^= key >> 2
    key ^= key >> 1
    return key
