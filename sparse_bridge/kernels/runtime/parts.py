"""Parts of device memory for launches, which read no more of a tensor than its address.

A view costs the host as much as a third of a launch, and a memory of its own more. So what many
launches work on lies in few tensors, and becomes a view where somebody needs one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import target as targets


class Part:
    """Elements of a vector: a tensor of `shape`, with one axis or two, and `dtype`, as far as
    launches go.

    start: of `memory`, in its elements.  step: from element to element of a part with one axis.
    """

    __slots__ = ("_view", "at", "dtype", "memory", "shape", "start", "step")

    def __init__(
        self, memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32, step: int = 1
    ) -> None:
        self.memory, self.start, self.shape = memory, start, shape
        self.dtype, self.step = dtype, step
        self.at = memory.data_ptr() + start * memory.itemsize
        self._view: torch.Tensor | None = None

    def __reduce__(self) -> Any:
        return Part, (self.memory, self.start, self.shape, self.dtype, self.step)

    def data_ptr(self) -> int:
        """Address of the first element, in bytes."""
        return self.at

    def view(self) -> torch.Tensor:
        """The part as a tensor of its shape and dtype, which shares its memory."""
        if self._view is None:
            memory, start, shape = self.memory, self.start, self.shape
            if self.dtype != memory.dtype:
                size = math.prod(shape) * self.dtype.itemsize // memory.itemsize
                # What `data` gives keeps none of the other views alive.
                memory, start = memory.narrow(0, start, size).view(self.dtype).data, 0
            steps = (self.step,) if len(shape) == 1 else (shape[1], 1)
            self._view = memory.as_strided(shape, steps, memory.storage_offset() + start)
        return self._view


_MOST = 1 << 20  # elements of a `Slab`: torch's allocator finds large ones a place less often
_LARGE = 2 << 20  # elements from which on few sizes are asked for
_ALIGNED = 32  # elements; what kernels read side by side
_SHARED = 1 << 20  # elements of several tile lists in one memory, 4 MiB

# What a launch takes for a tensor.
Operand = torch.Tensor | Part


def viewed(arg: Any) -> Any:
    """The tensor that an argument of a launch is; numbers as they are."""
    return arg.view() if type(arg) is Part else arg


def memory_of(arg: Operand) -> torch.Tensor:
    """The tensor that an operand lies in: itself, or the int32 vector [n] of a part."""
    return arg.memory if isinstance(arg, Part) else arg


def allocate_part(slab: Slab | None, device: torch.device, *shape: int, fill: int | None = None) -> Part:
    """A part, int32 of `shape`: of `slab`, which was filled like this, or of memory of its own. Raises RuntimeError
    where the slab is full."""
    if slab is None:
        slab = Slab(math.prod(shape), device, fill)
    return slab.part(*shape)


def octave_step(number: int, sizes: int) -> int:
    """The step whose multiples are so many sizes an octave, a power of two, about `number`."""
    return 1 << max(0, number.bit_length() - sizes.bit_length())


def memory_for(size: int, device: torch.device, fill: int | None = None) -> torch.Tensor:
    """int32 [size], or more where that is large: one of four sizes an octave. fill: of every
    element; None: anything.

    torch's allocator makes a segment of its own for what takes 10 MiB or more, and of scenes whose
    tables grow a little from one to the next it would keep them all. In captures, whose memory
    nobody else uses, no more than asked for.
    """
    if fill is not None and size < _LARGE:
        return torch.full((size,), fill, dtype=torch.int32, device=device)
    if size >= _LARGE and not targets.capturing(device):
        step = octave_step(size, 4)
        size = -(-size // step) * step
    memory = torch.empty(size, dtype=torch.int32, device=device)
    return memory if fill is None else memory.fill_(fill)


def memories_for(sizes: Sequence[int], device: torch.device) -> Sequence[torch.Tensor]:
    """int32 vectors [size] of these sizes, or more. Small ones that follow each other share a memory, at
    multiples of 128 bytes: to take one costs the host as much as a launch. It lives as long as the
    last of them, so large ones have their own."""
    memories, group = list[torch.Tensor](), list[int]()
    for size in sizes:
        aligned = -(-size // _ALIGNED) * _ALIGNED
        if group and sum(group) + aligned > _SHARED:
            memories += _side_by_side(group, device)
            group = []
        group.append(aligned)
    return memories + list(_side_by_side(group, device))


def _side_by_side(sizes: list[int], device: torch.device) -> Sequence[torch.Tensor]:
    if len(sizes) < 2:
        return [memory_for(size, device) for size in sizes]
    return torch.empty(sum(sizes), dtype=torch.int32, device=device).split_with_sizes(sizes)


class Slab:
    """int32 memory for several parts, which start at multiples of 16 bytes and live as long as the
    last of them."""

    def __init__(self, size: int, device: torch.device, fill: int | None = None) -> None:
        """size: of all parts, each `rounded`.  fill: of every element; None: anything."""
        self._size, self._taken = size, 0
        self._memory = memory_for(size, device, fill)

    @staticmethod
    def or_none(size: int, device: torch.device, fill: int | None = None) -> Slab | None:
        """A slab; None where nothing is to be had of it, or more than a few parts should keep."""
        return Slab(size, device, fill) if 0 < size <= _MOST else None

    @staticmethod
    def rounded(size: int) -> int:
        """Elements that a part of `size` takes."""
        return -(-size // 4) * 4

    def part(self, *shape: int) -> Part:
        """The next part, int32 of `shape`. Raises RuntimeError where the slab is full."""
        part, size = Part(self._memory, self._taken, shape), math.prod(shape)
        if self._taken + size > self._size:
            raise RuntimeError(f"{self._taken} elements are taken, {size} more of {self._size}.")
        self._taken += self.rounded(size)
        return part
