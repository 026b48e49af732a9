"""Where tensors lie in one block of memory: those that are not needed at the same time share a place. And what a
program takes of a GPU with that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNED = 256  # bytes, as allocators of GPUs align
CODE_PAGE = 4096  # a kernel's code begins at a multiple of so many bytes, or sooner
GPU_PAGE = 2 << 20  # drivers take memory by these
ALLOWANCE = 2 << 20  # for a stream, constants of kernels, and a graph


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


def needed(block: int, codes: Sequence[int]) -> int:
    """Bytes that a program takes on a GPU at most, beside what the driver takes for any: those of the block, and of
    the kernels, whose code has so many bytes each. `needed` of sparse_bridge_rt.c is its twin."""
    code = sum(_rounded_up(size, CODE_PAGE) for size in codes)
    return _rounded_up(block, GPU_PAGE) + _rounded_up(code, GPU_PAGE) + ALLOWANCE


def _rounded_up(size: int, to: int) -> int:
    return -(-size // to) * to
