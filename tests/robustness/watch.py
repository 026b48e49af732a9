"""What a process holds: tensors, map stores, cache entries, memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge.core.conv import plan
from sparse_bridge.core.device import workspace
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import Offsets
from sparse_bridge.core.maps import map_cache

__all__ = ["RunsOut", "box_bounds", "cache_sizes", "collect", "live_tensors", "resident_bytes"]


def collect(device: str | None = None) -> None:
    """Collect garbage, once autograd has let go of what it returned.

    Its thread of a GPU holds the results of `torch.autograd.grad` until it has had Python's lock, which a collection
    of few objects does not give away. It turns to another pass when that is done. device: whose thread; None: the
    current GPU's, if there is one in use.
    """
    if device is not None or torch.cuda.is_initialized():
        leaf = torch.ones((), device=device or "cuda", requires_grad=True)
        (leaf * 1).backward()  # not `grad`, whose result would be held in turn
    gc.collect()


def live_tensors() -> int:
    """Tensors that Python code can reach. Pieces that only a C++ graph holds are not among them."""
    collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def box_bounds(device: str) -> tuple[int, int]:
    """(tensors, memories) of bounds and of key steps that boxes of coordinates keep on
    `device`."""
    gc.collect()
    boxes = [one for one in gc.get_objects() if type(one) is Box]
    held = [layout for box in boxes for layout in box.layouts.values()]
    parts = [one for layout in held for one in (layout.bounds, layout.steps) if one is not None]
    parts = [one for one in parts if one.memory.device.type == device]
    memories = {id(one.memory) for one in parts}
    return len(memories) + sum(one._view is not None for one in parts), len(memories)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell (not Linux)."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memos() -> dict[str, Callable]:
    """Every function of the package that remembers its results."""
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith("sparse_bridge"):
            continue
        owners = [vars(module), *(vars(o) for o in vars(module).values() if isinstance(o, type))]
        for owner in owners:
            for value in list(owner.values()):
                value = value.__func__ if isinstance(value, staticmethod) else value
                if hasattr(value, "cache_info"):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def cache_sizes() -> dict[str, tuple[int, int | None]]:
    """(entries, most entries or None) of every cache of the package that lives with the process."""
    sizes = {}
    for name, function in _memos().items():
        info = function.cache_info()
        sizes[name] = (info.currsize, info.maxsize)
    sizes["map stores"] = (map_cache.count(), None)
    sizes["plans"] = (plan.count(), 8 << 16)
    sizes["offset lists"] = (len(Offsets._interned), None)
    geometry = sum(len(offsets._geometry) for offsets in Offsets._interned.values())
    sizes["offset lists on devices"] = (geometry, None)
    sizes["work buffers"] = (workspace.count(), None)
    launch = sys.modules.get("sparse_bridge.kernels.runtime.launch")
    if launch is not None:
        compiled = sum(len(kernel._compiled) for kernel in launch.REGISTRY.values())
        sizes["launch keys"] = (len(launch.numbers()), None)
        sizes["compiled kernels"] = (compiled, None)
    return sizes


class RunsOut(TorchDispatchMode):
    """Memory runs out at the `after`-th tensor that an operator would make (from 0); -1: never.

    made: how many were asked for.
    """

    def __init__(self, after: int = -1):
        super().__init__()
        self.after, self.made = after, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fresh = any(one.alias_info is None and "Tensor" in str(one.type) for one in func._schema.returns)
        if fresh:
            self.made += 1
            if self.made - 1 == self.after:
                raise torch.OutOfMemoryError(f"no memory for {func}, the {self.after}th tensor")
        return func(*args, **(kwargs or {}))
