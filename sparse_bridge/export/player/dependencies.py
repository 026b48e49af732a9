"""Which steps of a package have to wait for which: edges of the graph in which the player launches them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple


class Access(NamedTuple):
    """Bytes from `start` to `stop` of the memory that a step may read, or write too."""

    start: int
    stop: int
    writes: bool


def edges(steps: Sequence[Sequence[Access]]) -> list[tuple[int, int]]:
    """(earlier step, later step) for all pairs that share bytes of which one of both writes some, without those that
    follow from others; in the order of the later ones.

    steps: what each of them accesses.
    """
    borders = sorted({border for accesses in steps for it in accesses for border in it[:2]})
    writer = [-1] * len(borders)  # the last one of the bytes from a border to the next
    readers: list[set[int]] = [set() for _ in borders]  # since then
    before: list[int] = []  # of every step: all that come before it, as bits
    result: list[tuple[int, int]] = []
    for number, accesses in enumerate(steps):
        waits_for = set[int]()
        for start, stop, writes in accesses:
            for part in range(bisect.bisect_left(borders, start), bisect.bisect_left(borders, stop)):
                waits_for.add(writer[part])
                if writes:
                    waits_for |= readers[part]
        for start, stop, writes in accesses:
            for part in range(bisect.bisect_left(borders, start), bisect.bisect_left(borders, stop)):
                if writes:
                    writer[part], readers[part] = number, set()
                elif writer[part] != number:
                    readers[part].add(number)
        reached = 0
        for earlier in sorted(waits_for - {-1, number}, reverse=True):
            if not reached >> earlier & 1:
                result.append((earlier, number))
                reached |= before[earlier] | 1 << earlier
        before.append(reached)
    return result
