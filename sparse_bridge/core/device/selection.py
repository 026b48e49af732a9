"""Which code is to serve a device, by the settings and by what Triton says: pure questions, which
start nothing. Whether a device's kernels compute rightly is asked in `device_support`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ... import settings
from ...errors import DeviceError
from ...kernels.runtime import target as targets


class Selection(NamedTuple):
    """target: whose kernels are to serve; None: plain torch does.  problem: why kernels that were
    wanted cannot be had."""

    target: targets.Target | None
    problem: str | None


class _StandIn(threading.local):
    name, kernels = "", False


_stand_in = _StandIn()


@contextlib.contextmanager
def standing_in(name: str) -> Iterator[None]:
    """In this thread, tensors on the CPU are treated as those of a GPU, and served by whatever driver Triton has:
    what a GPU that is absent would launch can be recorded.

    name: of that GPU; plans are kept by it.  "torch": torch computes, what and in the order in which a GPU would.
    Plans are the process's: other threads must not compute layers meanwhile.
    """
    before = _stand_in.name, _stand_in.kernels
    _stand_in.name, _stand_in.kernels = name, name != "torch"
    settings.changed()
    try:
        yield
    finally:
        _stand_in.name, _stand_in.kernels = before
        settings.changed()


@contextlib.contextmanager
def maps_by_host() -> Iterator[None]:
    """Inside of `standing_in`, maps are built as the host builds them."""
    before, _stand_in.kernels = _stand_in.kernels, False
    try:
        yield
    finally:
        _stand_in.kernels = before


def stand_in() -> str:
    """The name that `standing_in` was given in this thread; "" outside of it."""
    return _stand_in.name


def stands_in() -> bool:
    """Whether launches for a GPU that is absent are recorded in this thread."""
    return _stand_in.kernels


def as_on_gpu(device: torch.device) -> bool:
    """Whether tensors of a device are served as those of a GPU."""
    return device.type != "cpu" or _stand_in.kernels


def ordered_as_on_gpu(device: torch.device) -> bool:
    """Whether rows of results have the order that they have on a GPU."""
    return device.type != "cpu" or _stand_in.name != ""


def forces_kernels() -> bool:
    """Whether the settings force a dataflow of Triton kernels."""
    flow = settings.DATAFLOWS.get(settings.get().dataflow)
    return flow is not None and flow.kernels


def select(device: torch.device) -> Selection:
    """GPUs use kernels unless a dataflow of plain torch is forced, CPU tensors only when one of
    kernels is."""
    flow = settings.DATAFLOWS.get(settings.get().dataflow)
    if not (flow.kernels if flow is not None else as_on_gpu(device)):
        return Selection(None, None)
    problem = targets.unavailable(device)
    return Selection(targets.of(device) if problem is None else None, problem)


def refusal(requirement: str, problem: str) -> DeviceError:
    """The error of a forced dataflow that needs `requirement`."""
    return DeviceError(
        f"SPARSE_BRIDGE_DATAFLOW={settings.get().dataflow} needs {requirement}, but {problem}. "
        "Use SPARSE_BRIDGE_DATAFLOW=auto or per_offset."
    )
