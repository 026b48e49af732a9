"""Which code is to serve a device, by the settings and by what Triton says: pure questions, which
start nothing. Whether a device's kernels compute rightly is asked in `device_support`."""

from __future__ import annotations

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


def forces_kernels() -> bool:
    """Whether the settings force a dataflow of Triton kernels."""
    flow = settings.DATAFLOWS.get(settings.get().dataflow)
    return flow is not None and flow.kernels


def select(device: torch.device) -> Selection:
    """GPUs use kernels unless a dataflow of plain torch is forced, CPU tensors only when one of
    kernels is."""
    flow = settings.DATAFLOWS.get(settings.get().dataflow)
    if not (flow.kernels if flow is not None else device.type != "cpu"):
        return Selection(None, None)
    problem = targets.unavailable(device)
    return Selection(targets.of(device) if problem is None else None, problem)


def refusal(requirement: str, problem: str) -> DeviceError:
    """The error of a forced dataflow that needs `requirement`."""
    return DeviceError(
        f"SPARSE_BRIDGE_DATAFLOW={settings.get().dataflow} needs {requirement}, but {problem}. "
        "Use SPARSE_BRIDGE_DATAFLOW=auto or per_offset."
    )
