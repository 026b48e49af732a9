"""The timers of `cumm.tensorview`: GPU times from torch events, CPU times from the wall clock.

All times are milliseconds. Where torch has no GPU the GPU timers record nothing.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import torch

from ....errors import ContractError


class CUDAKernelTimer:
    """Named events and pairs of them; does nothing where disabled or without a GPU.

    Names of events and pairs are prefixed with the pushed namespaces, joined by dots.
    """

    def __init__(self, enable: bool) -> None:
        self._enable = enable
        self._prefix: list[str] = []
        self._events: dict[str, torch.cuda.Event] = {}
        self._pairs: dict[str, tuple[str, str]] = {}

    @property
    def enable(self) -> bool:
        return self._enable

    def _name(self, name: str) -> str:
        return ".".join([*self._prefix, name])

    def push(self, name: str) -> None:
        if self.enable:
            self._prefix.append(name)

    def pop(self) -> None:
        if self._prefix:
            self._prefix.pop()

    def record(self, name: str, stream: int = 0) -> None:
        """Record the event `name` on a raw stream handle; 0 means torch's current stream."""
        if not self.enable or not torch.cuda.is_available():
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.ExternalStream(stream) if stream else torch.cuda.current_stream())
        self._events[self._name(name)] = event

    def insert_pair(self, name: str, start: str, stop: str) -> str:
        """Name the span between two recorded events; the full name, or "" where disabled."""
        if not self.enable:
            return ""
        full = self._name(name)
        self._pairs[full] = (self._name(start), self._name(stop))
        return full

    def has_pair(self, name: str) -> bool:
        return name in self._pairs

    def get_pair_duration(self, name: str) -> float:
        """Milliseconds between the two events of a pair; -1 where either was not recorded."""
        start, stop = (self._events.get(event) for event in self._pairs.get(name, ("", "")))
        if start is None or stop is None:
            return -1.0
        stop.synchronize()
        return start.elapsed_time(stop)

    def get_all_pair_duration(self) -> dict[str, float]:
        return {name: self.get_pair_duration(name) for name in self._pairs}

    def sync_all_event(self) -> None:
        for event in self._events.values():
            event.synchronize()


class _Duration:
    """What the measuring contexts hand out; `duration` is -1 until they end or if off."""

    def __init__(self) -> None:
        self.duration = -1.0


class KernelTimer:
    """A CUDAKernelTimer as contexts: `with timer.namespace("net"), timer.record("conv"):`."""

    def __init__(self, enable: bool = True, disable_if_cpu_only: bool = True) -> None:
        self.enable = enable and (torch.cuda.is_available() or not disable_if_cpu_only)
        self._timer = CUDAKernelTimer(True) if self.enable else None

    def get_cpp_object(self) -> CUDAKernelTimer:
        """The timer behind it. Raises ContractError where it is off."""
        if self._timer is None:
            raise ContractError("this KernelTimer is off, no timer is behind it; pass enable=True")
        return self._timer

    @contextlib.contextmanager
    def namespace(self, name: str) -> Iterator[None]:
        """Prefix the names recorded inside."""
        if self._timer is None:
            yield
            return
        self._timer.push(name)
        try:
            yield
        finally:
            self._timer.pop()

    @contextlib.contextmanager
    def record(self, name: str, stream: int = 0) -> Iterator[_Duration | None]:
        """Time the kernels enqueued inside."""
        if self._timer is None:
            yield None
            return
        start, stop = f"{name}.start", f"{name}.stop"
        self._timer.record(start, stream)
        yield _Duration()
        self._timer.record(stop, stream)
        self._timer.insert_pair(name, start, stop)

    def get_all_pair_time(self) -> dict[str, float]:
        """Milliseconds by full name; waits for the recorded kernels."""
        return {} if self._timer is None else self._timer.get_all_pair_duration()

    @staticmethod
    def collect_by_name(name: str, res: dict[str, float]) -> dict[str, float]:
        """The entries of `res` that have `name` among the dotted parts of their key."""
        return {key: value for key, value in res.items() if name in key.split(".")}


@contextlib.contextmanager
def _measured(enable: bool, device: bool) -> Iterator[_Duration]:
    """Time the block: the wall clock, after waiting for the GPU where `device` asks for it."""
    result = _Duration()
    if not enable or (device and not torch.cuda.is_available()):
        yield result
        return
    if device:
        torch.cuda.synchronize()
    start = time.perf_counter()
    yield result
    if device:
        torch.cuda.synchronize()
    result.duration = (time.perf_counter() - start) * 1e3


@contextlib.contextmanager
def _printed(name: str, out: list[float] | None, enable: bool, device: bool) -> Iterator[_Duration]:
    with _measured(enable, device) as result:
        yield result
    if result.duration < 0:
        return
    if out:
        out[0] = result.duration
    # The caller asked for a line on standard output: this is no log message.
    sys.stdout.write(f"{name}: {result.duration}\n")


def measure_and_print(
    name: str = "CUDATimer", *, stream: int = 0, out: list[float] | None = None, enable: bool = True
) -> contextlib.AbstractContextManager[_Duration]:
    """Write the milliseconds that the block takes on the GPU, and store them in `out[0]`."""
    return _printed(name, out, enable, True)


def measure_and_print_cpu(
    name: str = "CPUTimer", *, stream: int = 0, out: list[float] | None = None, enable: bool = True
) -> contextlib.AbstractContextManager[_Duration]:
    """Write the milliseconds that the block takes on the CPU, and store them in `out[0]`."""
    return _printed(name, out, enable, False)


def measure_duration(
    name: str = "CUDATimer", *, stream: int = 0, enable: bool = True
) -> contextlib.AbstractContextManager[_Duration]:
    """`with measure_duration() as m:` leaves the GPU milliseconds of the block in `m.duration`."""
    return _measured(enable, True)


def measure_duration_cpu(
    name: str = "CPUTimer", *, stream: int = 0, enable: bool = True
) -> contextlib.AbstractContextManager[_Duration]:
    """As `measure_duration`, by the wall clock."""
    return _measured(enable, False)
