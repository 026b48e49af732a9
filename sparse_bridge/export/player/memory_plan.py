"""Where tensors lie in one block of memory: those that are not needed at the same time share a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNED = 256  # bytes, as allocators of GPUs align


class Life(NamedTuple):
    """Bytes that are needed from step `begin` to step `end`, both included."""

    size: int
    begin: int
    end: int


class Plan(NamedTuple):
    """offsets: of every life, in order.  size: of the block; both in bytes."""

    offsets: tuple[int, ...]
    size: int


def plan(lives: Sequence[Life]) -> Plan:
    """Places such that no two overlap that live at the same time; the largest are placed first, each as
    low as it fits."""
    offsets = [0] * len(lives)
    placed: list[tuple[int, int, int, int]] = []  # offset, end, begin and end of the life
    total = 0
    for index in sorted(range(len(lives)), key=lambda i: (-lives[i].size, lives[i].begin, i)):
        life = lives[index]
        size = -(-max(life.size, 1) // ALIGNED) * ALIGNED
        at = 0
        for start, stop, begin, end in placed:
            if begin <= life.end and life.begin <= end and start < at + size and at < stop:
                at = stop
        offsets[index], total = at, max(total, at + size)
        placed.append((at, at + size, life.begin, life.end))
        placed.sort()
    return Plan(tuple(offsets), total)
