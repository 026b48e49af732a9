"""Which code serves a device: Triton kernels or plain torch. The answer is metadata only; nothing
is tried and caught."""

from __future__ import annotations

import torch

from .. import log, settings
from ..errors import DeviceError
from ..kernels import target as targets

__all__ = ["TRITON_DATAFLOWS", "kernel_target"]

TRITON_DATAFLOWS = ("masked", "unmasked")


def kernel_target(device: torch.device) -> targets.Target | None:
    """The target whose kernels serve tensors of `device`, or None where plain torch does.

    GPUs use Triton unless a torch dataflow is forced. CPU tensors use it only when a Triton
    dataflow is forced; then a missing driver is an error, never a silent fallback.
    """
    forced = settings.get().dataflow
    if forced in ("per_offset", "explicit"):
        return None
    if device.type == "cpu" and forced == "auto":
        return None
    reason = targets.unavailable(device)
    if reason is None:
        return targets.of(device)
    if forced in TRITON_DATAFLOWS:
        raise DeviceError(
            f"SPARSE_BRIDGE_DATAFLOW={forced} needs Triton kernels on {device}, but {reason}. "
            "Use SPARSE_BRIDGE_DATAFLOW=auto or per_offset."
        )
    log.once(
        ("no-triton", str(device)),
        f"Triton kernels do not run on {device}: {reason}. Using the per-offset dataflow in torch.",
        level=30,
    )
    return None
