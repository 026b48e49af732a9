"""Reusable CPU work buffers. Fresh memory costs a page fault every 4 KB, often more than the
arithmetic done in it."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading

import torch

from ... import state

_LIMIT_BYTES = 64 << 20  # larger buffers are made and dropped: nobody wants them to stay
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_CACHED_BYTES = 256 << 20
_local = threading.local()


def take(name: str, rows: int, columns: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised [rows, columns] tensor of `dtype` on `like`'s device; on the CPU the thread's buffer `name`,
    which the next call with that name and dtype overwrites. More than 64 MiB are new memory every time."""
    size = rows * columns
    if like.device.type != "cpu" or size * dtype.itemsize > _LIMIT_BYTES:
        return torch.empty((rows, columns), dtype=dtype, device=like.device)
    buffers: dict[tuple[str, torch.dtype], torch.Tensor] | None
    buffers = getattr(_local, "buffers", None)
    if buffers is None:
        buffers = _local.buffers = {}
    buffer = buffers.get((name, dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # it must serve calls outside inference mode too
            buffer = torch.empty(size, dtype=dtype, device="cpu")
        buffers[name, dtype] = buffer
    return buffer[:size].view(rows, columns)


@functools.cache
def keep_heap() -> None:
    """Have glibc keep freed blocks of up to 32 MB, and 256 MB of them, instead of giving them back
    to the system; without this, every layer's output is fresh memory (a tenth of a training step).

    For the whole process, unless the environment says how glibc is to trim. Other C libraries and
    allocators are left alone.
    """
    if sys.platform != "linux" or {"MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"} & set(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and platform.libc_ver()[0] == "glibc":
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, _CACHED_BYTES)


@state.owns
def reset() -> None:
    """Drop the calling thread's buffers."""
    _local.__dict__.pop("buffers", None)


def count() -> int:
    """The calling thread's buffers."""
    return len(getattr(_local, "buffers", ()))
