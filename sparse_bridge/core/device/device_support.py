"""Taking devices into use: before the first kernel of a device runs, whoever listens is told (the
warm-up compiles then), and the self-check is asked. The answers hold for the settings in force."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ... import log, settings, state
from ...kernels.runtime.target import Target
from ...refusals import Why
from . import rocm, self_check
from .selection import as_on_gpu, forces_kernels, refusal, select

# (device, target, whether keys have 64 bits) of kernels that are about to be used
FirstUse = Callable[[torch.device, Target, bool], None]


class Devices:
    """What a process has decided about its devices."""

    def __init__(self) -> None:
        self._listeners: list[FirstUse] = []
        self.reset()

    def reset(self) -> None:
        """Forget every decision, and that devices were used; who listens stays."""
        self._targets: dict[tuple[torch.device, bool, bool], Target] = {}
        self._used: set[tuple[torch.device, bool]] = set()
        self._problems: dict[torch.device, str] = {}
        self._generation = -1

    def on_first_use(self, listener: FirstUse) -> None:
        """Have `listener` called before the first use of each device and width of keys."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def kernel_target(self, device: torch.device, key64: bool = False, expands: bool = False) -> Target | None:
        """The target whose kernels serve tensors of `device`, or None where plain torch does: by
        `selection.select`, and by the self-check of look-ups (key64: by 64-bit keys; expands: and
        of maps that make new coordinates).

        Raises: DeviceError for a forced dataflow that cannot be had; never a silent fallback.
        """
        if device.type != "cuda":  # whose driver may be another at the next call
            if not (forces_kernels() or as_on_gpu(device)):  # as `select` says, but at once
                return None
            return self._find(device, key64, expands)
        if self._generation != settings.generation:
            self._targets, self._generation = {}, settings.generation
        target = self._targets.get((device, key64, expands))
        if target is None:
            rocm.warn_about_allocator()
            target = self._find(device, key64, expands)
            if target is not None:
                self._targets[device, key64, expands] = target
        return target

    def _find(self, device: torch.device, key64: bool, expands: bool) -> Target | None:
        target, problem = select(device)
        if target is not None:
            self._announce(device, target, key64)
            problem = self_check.problem(device, target, "int64 keys" if key64 else "int32 keys")
            if problem is None and expands:
                problem = self_check.problem(device, target, self_check.NEW_COORDINATES)
            if problem is None:
                return target
        if problem is None:
            self._problems.pop(device, None)
            return None
        if forces_kernels():
            raise refusal(f"Triton kernels on {device}", problem)
        self._problems[device] = problem
        reason = Why.FLOW_DEVICE.says(device, problem)
        log.once(("no-triton", str(device), problem), f"{reason}. Using the per-offset dataflow in torch.", level=30)
        return None

    def problem_of(self, device: torch.device) -> str | None:
        """Why `kernel_target` has last found none for a device that kernels were wanted on."""
        return self._problems.get(device)

    def _announce(self, device: torch.device, target: Target, key64: bool) -> None:
        if (device, key64) not in self._used:
            self._used.add((device, key64))
            for listener in self._listeners:
                listener(device, target, key64)


_devices = Devices()  # of this process
kernel_target, problem_of = _devices.kernel_target, _devices.problem_of
on_first_use = _devices.on_first_use
reset = state.owns(_devices.reset)


def notes() -> tuple[str, ...]:
    """What the self-check has taken from Triton kernels in this process, one sentence each."""
    return tuple(f"{verdict.device}: {verdict.problem}; {verdict.instead} instead" for verdict in self_check.failures())
