"""First calls without a GPU: which forms of kernels are begun early, which are asked for, in which
order.

The package is told that CPU tensors are a GPU's. What its warm-up hands to threads is noted instead
of compiled, and so is every launch; those of maps run on the emulated GPU, because what follows
depends on them, products do not run. Where a launch asks for what nobody has begun, a program on
that GPU would stand and compile.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from sparse_bridge import settings
from sparse_bridge.core.conv import convolution, plan
from sparse_bridge.core.device import device_support, selection, self_check, self_check_problems
from sparse_bridge.core.ops import pointwise
from sparse_bridge.core.warmup import compilation
from sparse_bridge.kernels.runtime import launch, precompile
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.kernels.runtime.parts import viewed
from sparse_bridge.kernels.runtime.target import Target

from .counting import UNITS, Counted, CountingDriver, counting


@dataclasses.dataclass
class Event:
    """A form that was handed to the compiling threads (early), or that a launch asked for.

    key: what the launcher tells forms apart by.  form: what Triton does.  part: of the program.
    """

    early: bool
    name: str
    key: Any
    form: Counted
    part: str

    @property
    def constants(self) -> str:
        """Of the kernel, and its options."""
        names = self.form.source.fn.arg_names
        held = {names[place[0]]: value for place, value in self.form.source.constants.items()}
        told = [f"{name}={value}" for name, value in held.items() if name.isupper()]
        options = self.form.options
        return " ".join([*told, f"{options.get('num_warps')} warps, {options.get('num_stages')}"])


class DryRun:
    """What happened, in order."""

    def __init__(self, driver: CountingDriver) -> None:
        self.driver, self.events, self.part = driver, list[Event](), ""

    def note(self, kernel: launch.Kernel, key: Any, early: bool, form: Counted) -> None:
        self.events.append(Event(early, kernel.name, (kernel.name, key), form, self.part))

    def firsts(self) -> list[Event]:
        """The first event of each form: begun early, or stood for."""
        found: dict[Any, Event] = {}
        for event in self.events:
            found.setdefault(event.key, event)
        return list(found.values())

    def late(self) -> list[Event]:
        """Launches that stand: nobody had begun their form."""
        return [event for event in self.firsts() if not event.early]

    def unused(self) -> list[Event]:
        """Forms that were begun and that no launch asked for."""
        asked = {event.key for event in self.events if not event.early}
        return [event for event in self.firsts() if event.early and event.key not in asked]


def _target(arch: str) -> Target:
    return dataclasses.replace(targets.described(arch, UNITS[arch]), raw=True)


def forget() -> None:
    """What the package remembers of a process's first calls."""
    from sparse_bridge.adapters.flex_gemm import warmup
    from sparse_bridge.core.prefetch import prefetch

    plan.reset()  # whose products are those of this GPU, and told once
    compilation.reset()
    device_support.reset()
    self_check.reset()
    prefetch.forget()
    warmup.reset()


@contextlib.contextmanager
def dry_run(arch: str) -> Iterator[DryRun]:
    """Inside, CPU tensors are those of a GPU that has run nothing yet."""
    target = _target(arch)
    chosen = selection.Selection(target, None)
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(counting(arch, pretend_gpu=False))
        driver.largest = 0
        found = DryRun(driver)

        def launched(
            kernel: launch.Kernel,
            device: torch.device,
            target: Target,
            grid: Any,
            args: Any,
            constants: Any,
            options: dict[str, Any],
            key: Any,
        ) -> None:
            early = precompile.futures() is not None
            options, args = {**launch.OPTIONS, **options}, tuple(map(viewed, args))
            if early:
                form = kernel.fn.warmup(*args, *constants, grid=grid, **options)
            else:
                form = kernel.fn[grid](*args, *constants, **options)
            found.note(kernel, kernel.variant(target, args, key), early, form)

        patches = [
            (launch.Kernel, "launch", launched),
            (launch.Kernel, "start", lambda *_: False),
            (device_support, "select", lambda device: chosen),
            (device_support, "forces_kernels", lambda: True),
            (self_check, "applies", lambda device: settings.get().self_check),
            (self_check_problems, "_compare", lambda *_: None),  # products do not run
            (
                convolution,
                "MIN_DEFERRED_ELEMENTS",
                dict.fromkeys((False, True), convolution.MIN_DEFERRED_ELEMENTS[True]),
            ),
            (pointwise, "DEVICES", ("cpu",)),
        ]
        for place in patches:
            stack.enter_context(mock.patch.object(*place))
        # `target.of` is cached for no CPU.
        stack.enter_context(mock.patch.object(targets, "of", lambda device: target))
        forget()
        try:
            yield found
        finally:
            forget()
