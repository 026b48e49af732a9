"""Which offsets are multiplied together: adaptive grouping, after Tang et al., "TorchSparse:
Efficient Point Cloud Inference Engine" (MLSys 2022, arXiv 2204.10319).

The pair lists of a group are padded to its longest one and multiplied by one `bmm`, as long as the
redundant share of the rows, 1 - sum(sizes) / (n * longest), stays within epsilon; lists of more
than S pairs are multiplied one by one. The paper walks the offsets in their own order; here they
are sorted by size first, which leaves a third of the padding (of a sheet-like scene's 22 lists
17 % of the rows instead of 44 % at epsilon 0.5) and costs a copy of the matrices.

The paper searches epsilon and S per layer. Here they follow from costs. One by one a list costs
three or four calls, a group five, or ten with gradients where one by one takes five: groups of
three and more save calls. S is the length at which a list's own work takes as long as its calls;
what is longer hides them. Then n lists of up to S pairs save the time of 3 n - 5 calls and add at
most epsilon * n lists of S pairs, so 3 n epsilon calls: a gain, even in the worst case of three
lists, for epsilon up to 4 / 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EPSILON = 0.4
FEWEST = 3
# Values, c_in + c_out per pair, that a GPU gathers, multiplies and adds up in the time of an
# offset's calls: 15 bytes of traffic for each fp32 one, at 0.8 TB/s in 40 us. An H200, whose host
# took 80 us, would gain up to 2^22.
WORTH = 1 << 21
_ROOM = 4  # times that, of a group with its padding: 32 MB of fp32 rows and products
# Shorter than the pieces that lists are cut into, so that a group meets no offset twice.
_LONGEST = (1 << 15) - 1


class Limits(NamedTuple):
    """epsilon: redundant share of a group's rows, at most.  longest: S, pairs of a list, at most.
    room: rows of a group with its padding, at most.  fewest: lists of a group, at least."""

    epsilon: float
    longest: int
    room: int
    fewest: int = FEWEST


def limits_of(c_in: int, c_out: int) -> Limits:
    """The limits for a layer of these channels. Widths are rounded up to powers of two: layers
    that share a map mostly share its groups."""
    width = _rounded(c_in + c_out)
    return Limits(EPSILON, min(_LONGEST, WORTH // width), _ROOM * WORTH // width)


def _rounded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def groups_of(sizes: Sequence[int], limits: Limits) -> list[list[int]]:
    """Places in `sizes` of the lists that go together, ascending, the groups with the shortest
    lists first; lists that are empty, too long or left with too few others are in none."""
    fits = [index for index, size in enumerate(sizes) if 0 < size <= limits.longest]
    groups: list[list[int]] = []
    group: list[int] = []
    total = 0
    for index in sorted(fits, key=sizes.__getitem__):
        size = sizes[index]  # the longest so far
        padded = (len(group) + 1) * size
        redundant = padded - total - size
        if group and (padded > limits.room or redundant > limits.epsilon * padded):
            groups.append(group)
            group, total = [], 0
        group.append(index)
        total += size
    groups.append(group)
    return [sorted(group) for group in groups if len(group) >= limits.fewest]
