"""What is in use on a device, and room under a limit on memory: maps that layers used under one are
known here, and those that were used least recently are dropped first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch

from ... import memory, state
from ...errors import MemoryLimitError, UnsupportedError


class Droppable(Protocol):
    """What can be made again.  nbytes: what it holds now."""

    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes on the device now."""

    def drop(self) -> None:
        """Let go of what can be made again."""


_lock = threading.Lock()
_used: dict[int, weakref.ref[Droppable]] = {}  # in the order of their last use


def use(droppable: Droppable) -> None:
    """Say that `droppable` is used now."""
    with _lock:
        _used.pop(id(droppable), None)
        _used[id(droppable)] = weakref.ref(droppable)


def _alive(device: torch.device) -> list[Droppable]:
    with _lock:
        used = [(key, droppable()) for key, droppable in _used.items()]
        for key, droppable in used:
            if droppable is None:
                del _used[key]
    return [droppable for _, droppable in used if droppable is not None and droppable.device == device]


@state.owns
def reset() -> None:
    """Forget which maps layers used."""
    with _lock:
        _used.clear()


def in_use(device: torch.device, *operands: torch.Tensor | None) -> int:
    """Bytes in use on a device: as torch's allocator counts them; on the CPU, where none counts, those of an
    operation's operands (any shape and dtype, None for none) and of the maps that are known."""
    if device.type in ("cuda", "xpu"):
        return memory.allocated(torch.get_device_module(device), device)[0]
    own = {operand.data_ptr(): operand.nbytes for operand in operands if operand is not None}
    return sum(own.values()) + sum(operand.nbytes for operand in _alive(device))


def limit_on(device: torch.device) -> int | None:
    """The limit in force, for an operation that begins on a device.

    Raises: MemoryLimitError where other operations, such as torch's own layers, have exceeded it.
    """
    if memory.limit is not None and device.type == "cuda":
        memory.check(torch.cuda.current_device() if device.index is None else device.index)
    return memory.limit


def drop_others(device: torch.device, enough: Callable[[], bool], keep: object = None) -> bool:
    """Drop maps, except for `keep`, until there is `enough` room; whether there is."""
    for droppable in _alive(device):
        if enough():
            return True
        if droppable is not keep:
            droppable.drop()
    return enough()


def need(device: torch.device, n_bytes: int, operation: str, *operands: torch.Tensor | None) -> None:
    """Have room under the limit in force for `n_bytes` more, which `operation` takes. operands: of any shape and dtype,
    as in `in_use`.

    Raises: MemoryLimitError, once all maps that can be made again are dropped.
    """
    limit = limit_on(device)
    if limit is None:
        return
    if not drop_others(device, lambda: in_use(device, *operands) + n_bytes <= limit):
        least = in_use(device, *operands) + n_bytes
        raise refusal(operation, limit, least, least)


def refuse_gradients() -> NoReturn:
    """UnsupportedError for a layer that records gradients under a limit."""
    raise UnsupportedError(
        "sparse_bridge.memory_limit holds in inference, and a layer recorded gradients; run it "
        "under torch.no_grad(). In training, sparse_bridge.checkpoint(module) saves memory."
    )


def refusal(operation: str, limit: int, size: int, least: int) -> MemoryLimitError:
    """The error that says how many bytes an operation takes.  size: in one piece; least: in blocks."""
    pieces = memory.format_bytes(size)
    if least < size:
        pieces += f" in one piece and {memory.format_bytes(least)} in the smallest blocks"
    return MemoryLimitError(
        f"{operation} does not fit under the memory limit of {memory.format_bytes(limit)}: it takes {pieces}, "
        f"what is in use beside it included. Raise the limit to {least} bytes or more, let go of "
        "tensors that are not needed any longer, or use smaller batches.",
        limit,
        size,
        least,
    )
