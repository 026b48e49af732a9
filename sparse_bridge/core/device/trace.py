"""Observing what ran: a `with record() as events` block collects one event per sparse operation of
this thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Watcher = Callable[[Any, Any, Any], object]


class MapSizes(Protocol):
    """What a kernel map says of its size: rows of its ends, and offsets."""

    @property
    def n_in(self) -> int:
        """Rows of x."""

    @property
    def n_out(self) -> int:
        """Rows of y."""

    @property
    def n_offsets(self) -> int:
        """The kernel volume."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation: what ("conv", "pool", "linear"), its dataflow, rows, channels and kernel
    volume."""

    kind: str
    dataflow: str
    n_in: int
    n_out: int
    c_in: int
    c_out: int
    n_offsets: int


_local = threading.local()
recorders = 0  # in all threads
_lock = threading.Lock()


def emit(kind: str, dataflow: str, kmap: MapSizes, c_in: int, c_out: int) -> None:
    """Report an operation; costs a comparison when nobody listens."""
    if recorders and (sinks := getattr(_local, "sinks", None)):
        event = Event(kind, dataflow, kmap.n_in, kmap.n_out, c_in, c_out, kmap.n_offsets)
        for sink in sinks:
            sink.append(event)


def emit_linear(dataflow: str, n_rows: int, c_in: int, c_out: int) -> None:
    """Report a layer that is one matrix product over all rows."""
    if recorders and (sinks := getattr(_local, "sinks", None)):
        event = Event("linear", dataflow, n_rows, n_rows, c_in, c_out, 1)
        for sink in sinks:
            sink.append(event)


def show(plan: Any, weight: Any, kmap: MapSizes) -> None:
    """Tell those who watch convolutions of this thread of one."""
    for watcher in getattr(_local, "watchers", ()):
        watcher(plan, weight, kmap)


@contextlib.contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Have `watcher` called as (plan, weight, kernel map) after each convolution of this thread."""
    watchers = _local.__dict__.setdefault("watchers", [])
    watchers.append(watcher)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        watchers.remove(watcher)


def _count(step: int) -> None:
    global recorders
    with _lock:
        recorders += step


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Collect the events of the current thread."""
    events: list[Event] = []
    sinks = _local.__dict__.setdefault("sinks", [])
    sinks.append(events)
    _count(1)
    try:
        yield events
    finally:
        _count(-1)
        sinks[:] = [sink for sink in sinks if sink is not events]
