"""Reusable CPU work buffers. Fresh memory costs a page fault every 4 KB, often more than the
arithmetic done in it."""

from __future__ import annotations

import functools
import sys
import threading

import torch

__all__ = ["keep_heap", "release", "take"]

_LIMIT_BYTES = 64 << 20  # larger buffers are made and dropped: nobody wants them to stay
_local = threading.local()


def take(
    name: str, rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """An uninitialised [rows, columns] tensor on `like`'s device; on the CPU the thread's buffer
    `name`, which the next call with that name overwrites."""
    size = rows * columns
    if like.device.type != "cpu" or size * dtype.itemsize > _LIMIT_BYTES:
        return torch.empty((rows, columns), dtype=dtype, device=like.device)
    buffers: dict[tuple[str, torch.dtype], torch.Tensor] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((name, dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # it must serve calls outside inference mode too
            buffer = torch.empty(size, dtype=dtype)
        buffers[name, dtype] = buffer
    return buffer[:size].view(rows, columns)


@functools.cache
def keep_heap() -> None:
    """Teach glibc once to keep freed blocks of up to 32 MB instead of giving them back to the
    system.

    Its allocator adapts to the largest block it has seen released; without this, every layer's
    output is fresh memory. Other allocators ignore it.
    """
    if sys.platform == "linux":
        torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)


def release() -> None:
    """Drop the calling thread's buffers."""
    _local.__dict__.pop("buffers", None)
