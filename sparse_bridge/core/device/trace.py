"""Observing what ran: a `with record() as events` block collects one event per sparse operation of
this thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..maps.kernel_map import KernelMap


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


def emit(kind: str, dataflow: str, kmap: KernelMap, c_in: int, c_out: int) -> None:
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


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Collect the events of the current thread."""
    global recorders
    events: list[Event] = []
    sinks = _local.__dict__.setdefault("sinks", [])
    sinks.append(events)
    with _lock:
        recorders += 1
    try:
        yield events
    finally:
        with _lock:
            recorders -= 1
        sinks[:] = [sink for sink in sinks if sink is not events]
