"""Handles: tensors of one integer that stand for objects in a graph.

A graph holds tensors and numbers, so a kernel map or a set of coordinates passes through it as an
int64 tensor [1] on the CPU. The number names the object. The memory of the tensor owns it: the
object lives exactly as long as the storage that `make` returned, wherever a graph keeps it.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any, TypeVar

import torch

from ...errors import LifecycleError

T = TypeVar("T")


class _Memory(bytearray):
    """The bytes of a handle, with the object that it stands for."""

    __slots__ = ("__weakref__", "value")
    value: Any


_numbers = itertools.count(1)
_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def make(value: object) -> torch.Tensor:
    """A handle for `value`: int64 [1] on the CPU."""
    number = next(_numbers)
    memory = _Memory(number.to_bytes(8, sys.byteorder))
    memory.value = value
    _memories[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def like() -> torch.Tensor:
    """What a handle looks like while a graph is traced: int64 [1] on the CPU."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


def value_of(handle: torch.Tensor, cls: type[T]) -> T:
    """The object behind a handle, int64 [1] on the CPU. Raises LifecycleError where it is gone, or of another class."""
    memory = _memories.get(int(handle))
    if memory is None or not isinstance(memory.value, cls):
        raise LifecycleError(
            f"handle {int(handle)} stands for no {cls.__name__} of this process; handles are made "
            "by sparse_bridge's operators, and live as long as the tensor that those returned. Do "
            "not copy or save them."
        )
    value: T = memory.value
    return value


def count() -> int:
    """How many objects handles keep alive."""
    return len(_memories)
