"""The key that rows are ordered by: rank in a Gray code of the offset mask after its bits were
renumbered by frequency, rarest offset most significant (Gray order: FlexGEMM; the renumbering is
ours and removes 10 to 25 % of the remaining redundant work on real scans).

Above 31 offsets the rank has 31 bits: on sparse maps bit b stands for a group of offsets of like
frequency, on dense maps for a single offset out of each group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.launch import power_of_2

KEY_BITS = 31
LEAST_OFFSETS = 32  # smaller kernels share one form
SAMPLE = 256  # rows that tell how frequent the offsets are
DENSE = 0.2  # share of present entries from which single offsets serve the rank better than groups


def offset_block(n_offsets: int) -> int:
    """Offsets that a form of the kernels holds."""
    return max(LEAST_OFFSETS, power_of_2(n_offsets))


@triton.jit
def key_places(
    mask_ptr, live, n_rows, n_offsets, V_BLOCK: tl.constexpr, BITS: tl.constexpr,
    DENSE: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
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
        place = (u // 32).to(tl.int64)[:, None] * n_rows + (index * spread)[None, :]
        word = tl.load(mask_ptr + place, mask=ok, other=0)
        total += tl.sum((word >> (u % 32)[:, None]) & 1, 1)
    if V_BLOCK <= 64:
        other, mine, w = total[None, :], total[:, None], u[None, :]
        rarer = (other < mine) | ((other == mine) & (w < u[:, None]))
        rank = tl.sum((rarer & (w < n_offsets)).to(tl.int32), 1)
    else:
        rank = tl.zeros((V_BLOCK,), tl.int32)
        for w in range(n_offsets):
            other = tl.sum(tl.where(u == w, total, 0), 0)
            rank += ((other < total) | ((other == total) & (w < u))).to(tl.int32)
    if V_BLOCK <= 32:
        places = tl.minimum(n_offsets, BITS) - 1 - rank
    else:
        group = rank * BITS // n_offsets
        places = BITS - 1 - group
        present = tl.sum(total, 0).to(tl.float32)
        first = (rank == 0) | ((rank - 1) * BITS // n_offsets != group)
        if present > DENSE * n_offsets * sampled:
            places = tl.where(first, places, -1)
    return places


@triton.jit
def gray_rank(mask_ptr, row, live, n_rows, n_offsets, places, V_BLOCK: tl.constexpr):
    """int32 key of every row. places: what `key_places` returned."""
    u = tl.arange(0, V_BLOCK)
    key = tl.zeros_like(row)
    for w in range((n_offsets + 31) // 32):
        word = tl.load(mask_ptr + w * n_rows.to(tl.int64) + row, mask=row < live, other=0)
        for bit in range(tl.minimum(n_offsets - w * 32, 32)):
            shift = tl.sum(tl.where(u == w * 32 + bit, places, 0), 0)
            if shift >= 0:
                key |= ((word >> bit) & 1) << shift
    key ^= key >> 16
    key ^= key >> 8
    key ^= key >> 4
    key ^= key >> 2
    key ^= key >> 1
    return key
