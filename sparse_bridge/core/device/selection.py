"""Which code serves a device: Triton kernels or plain torch. Answered from metadata and, on a GPU,
from the self-check at first use; a layer's own failure is never caught."""

from __future__ import annotations

import torch

from ... import log, settings
from ...errors import DeviceError
from ...kernels.runtime import target as targets
from . import rocm, self_check

__all__ = ["TRITON_DATAFLOWS", "kernel_target", "notes", "trusts"]

TRITON_DATAFLOWS = ("masked", "unmasked")


def kernel_target(device: torch.device, key64: bool = False) -> targets.Target | None:
    """The target whose kernels serve tensors of `device`, or None where plain torch does.

    GPUs use Triton unless a torch dataflow is forced or their look-ups fail the self-check (key64:
    those by 64-bit keys). CPU tensors use it only when a Triton dataflow is forced. A forced Triton
    dataflow that cannot be had is an error, never a silent fallback.
    """
    if device.type != "cuda":
        return _kernel_target(device, key64)
    known, key = _known(), (device, key64)
    found = known.get(key)
    if found is None:
        rocm.warn_about_allocator()
        found = _kernel_target(device, key64)
        if found is not None:
            known[key] = found
    return found


_targets: dict[tuple[torch.device, bool], targets.Target] = {}
_verdicts: tuple[settings.Settings | None, int] = (None, 0)


def _known() -> dict[tuple[torch.device, bool], targets.Target]:
    """GPUs whose kernels serve, under the present settings and verdicts: layers ask several
    times."""
    global _verdicts
    now = settings.get()
    if now is not _verdicts[0] or self_check.generation != _verdicts[1]:
        _targets.clear()
        _verdicts = now, self_check.generation
    return _targets


def _kernel_target(device: torch.device, key64: bool) -> targets.Target | None:
    forced = settings.get().dataflow
    if forced in ("per_offset", "explicit"):
        return None
    if device.type == "cpu" and forced == "auto":
        return None
    reason = targets.unavailable(device)
    if reason is None:
        target = targets.of(device)
        if (device, key64) not in _prepared:
            _prepare(device, target, key64)
        reason = self_check.problem(device, target, "int64 keys" if key64 else "int32 keys")
        if reason is None:
            return target
    if forced in TRITON_DATAFLOWS:
        raise DeviceError(
            f"SPARSE_BRIDGE_DATAFLOW={forced} needs Triton kernels on {device}, but {reason}. "
            "Use SPARSE_BRIDGE_DATAFLOW=auto or per_offset."
        )
    log.once(
        ("no-triton", str(device), reason),
        f"Triton kernels do not run on {device}: {reason}. Using the per-offset dataflow in torch.",
        level=30,
    )
    return None


_prepared: set[tuple[torch.device, bool]] = set()


def _prepare(device: torch.device, target: targets.Target, key64: bool) -> None:
    """Before the first question to a device: compile what will be needed, side by side."""
    from ..warmup.first_use import prepare

    _prepared.add((device, key64))
    prepare(device, target, key64)


def trusts(device: torch.device, target: targets.Target, dtype: torch.dtype) -> bool:
    """Whether kernels multiply in `dtype` (fp16, bf16, fp32) on `device`, by the self-check.

    Where they do not, the per-offset dataflow takes over with one warning.
    Raises: DeviceError when a Triton dataflow is forced.
    """
    reason = self_check.problem(device, target, self_check.NAMES[dtype])
    if reason is None:
        return True
    forced = settings.get().dataflow
    if forced in TRITON_DATAFLOWS:
        raise DeviceError(
            f"SPARSE_BRIDGE_DATAFLOW={forced} needs {dtype} products on {device}, but {reason}. "
            "Use SPARSE_BRIDGE_DATAFLOW=auto or per_offset, or another dtype."
        )
    log.once(
        ("self-check", str(device), reason),
        f"On {device} ({target.arch}) {reason}. Layers in {dtype} use the per-offset dataflow in "
        "torch. Please report this with the output of `python -m sparse_bridge doctor --json`.",
        level=30,
    )
    return False


def notes() -> tuple[str, ...]:
    """What the self-check has taken from Triton kernels in this process, one sentence each."""
    return tuple(
        f"{verdict.device}: {verdict.problem}; the per-offset dataflow in torch takes over"
        for verdict in self_check.failures()
    )
