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


class _Placed(NamedTuple):
    """Bytes from `start` to `stop`, in use from step `begin` to step `end`."""

    start: int
    stop: int
    begin: int
    end: int


def plan(lives: Sequence[Life], groups: Sequence[Sequence[int]] = ()) -> Plan:
    """Places such that no two overlap that live at the same time; the largest are placed first, each as
    low as it fits.

    groups: indices of lives that lie one behind another, in this order.
    """
    offsets = [0] * len(lives)
    placed: list[_Placed] = []
    grouped = {index for group in groups for index in group}
    units = [*map(list, groups), *([index] for index in range(len(lives)) if index not in grouped)]
    units.sort(key=lambda unit: (-sum(lives[i].size for i in unit), min(lives[i].begin for i in unit), unit[0]))
    for unit in units:
        own, above = [], 0
        for index in unit:
            size = _rounded_up(max(lives[index].size, 1), ALIGNED)
            own.append(_Placed(above, above + size, lives[index].begin, lives[index].end))
            above += size
        at = _lowest(own, placed)
        for index, (start, stop, begin, end) in zip(unit, own, strict=True):
            offsets[index] = at + start
            placed.append(_Placed(at + start, at + stop, begin, end))
        placed.sort()
    return Plan(tuple(offsets), max((stop for _, stop, _, _ in placed), default=0))


def _lowest(unit: Sequence[_Placed], placed: Sequence[_Placed]) -> int:
    """The lowest offset for all of a unit, whose own offsets begin at 0. placed: in order."""
    at, moved = 0, True
    while moved:
        moved = False
        for start, stop, begin, end in unit:
            for other in placed:
                together = other.begin <= end and begin <= other.end
                if together and other.start < at + stop and at + start < other.stop:
                    at, moved = other.stop - start, len(unit) > 1
    return at


def needed(block: int, codes: Sequence[int]) -> int:
    """Bytes that a program takes on a GPU at most, beside what the driver takes for any: those of the block, and of
    the kernels, whose code has so many bytes each. `needed` of sparse_bridge_rt.c is its twin."""
    code = sum(_rounded_up(size, CODE_PAGE) for size in codes)
    return _rounded_up(block, GPU_PAGE) + _rounded_up(code, GPU_PAGE) + ALLOWANCE


def _rounded_up(size: int, to: int) -> int:
    return -(-size // to) * to
