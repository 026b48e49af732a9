"""Memory of captured graphs in expandable segments, a setting of torch's allocator for CUDA.

A graph keeps the memory that its launches take. In ordinary segments that is a quarter more, as blocks of many sizes
leave gaps between them. An expandable segment is one range of addresses, which grows as it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys

import torch

from . import rocm
from .torch_compat import set_allocator

_TEXT = "expandable_segments:"
_LEFT = ("", f"{_TEXT}False")  # what the allocator was told, if only here
# Of cuDeviceGetAttribute: virtual memory, and handles to it as torch asks for them.
_ATTRIBUTES = (102, 103)


@functools.cache
def has_virtual_memory(device: int) -> bool:
    """Whether the driver has virtual memory for a device, as those of some virtual machines have not."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        handle, value = ctypes.c_int(), ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device):
            return False
        return all(
            not driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle) and value.value == 1
            for attribute in _ATTRIBUTES
        )
    except (OSError, AttributeError):
        return False


def possible(device: int) -> bool:
    """Whether captures may take them: nobody has told torch's allocator anything, in the environment or since."""
    if set_allocator is None or sys.platform != "linux" or not rocm.has_expandable_segments():
        return False
    if not has_virtual_memory(device):
        return False
    with contextlib.suppress(Exception):  # private to torch; without it segments are ordinary ones
        said = torch.cuda.memory._snapshot()["allocator_settings"]
        texts = [text for name, text in said.items() if name.startswith("PYTORCH")]
        return bool(texts) and all(text in _LEFT for text in texts)
    return False


def turn(on: bool) -> None:
    """Take memory in expandable segments, or no longer. For callers to whom it is `possible`."""
    assert set_allocator is not None
    set_allocator(f"{_TEXT}{on}")
