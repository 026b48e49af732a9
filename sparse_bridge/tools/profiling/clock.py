"""Times and memory of one call: the host's clock, and events on the GPU that computes it."""

from __future__ import annotations

import time

import torch


class Interval:
    """From `start` to `stop`; `device_ms` waits for nothing, so synchronize before it.

    device: where the call computes. Events go to the current stream of a GPU; there are none on
    other devices, nor while that stream is captured.
    """

    __slots__ = ("_begin", "_device", "_end", "_started", "host_ms")

    def __init__(self, device: torch.device | None) -> None:
        timed = device is not None and device.type == "cuda"
        self._device = device if timed and not torch.cuda.is_current_stream_capturing() else None
        self._begin: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self.host_ms = 0.0
        self._started = 0.0

    def start(self) -> Interval:
        self._begin = self._mark()
        self._started = time.perf_counter()
        return self

    def stop(self) -> None:
        self.host_ms = (time.perf_counter() - self._started) * 1e3
        self._end = self._mark()

    def _mark(self) -> torch.cuda.Event | None:
        if self._device is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def device_ms(self) -> float | None:
        """Between the two events; None where there are none."""
        if self._begin is None or self._end is None:
            return None
        return float(self._begin.elapsed_time(self._end))

    @property
    def device(self) -> torch.device | None:
        """The GPU that has to finish before `device_ms`; None for other devices."""
        return self._device


class Peak:
    """How far a call raises the allocated bytes of a GPU, calls inside of it included.

    torch keeps one peak, which every call begins anew; so each hands what it saw to the call
    around it.
    """

    __slots__ = ("_allocated", "_around", "_device", "_most")

    def __init__(self, device: torch.device | None, around: Peak | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._around, self._allocated, self._most = around, 0, 0
        if self._device is not None:
            if around is not None:
                around._see(self._device)
            self._allocated = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def _see(self, device: torch.device) -> None:
        if device == self._device:
            self._most = max(self._most, torch.cuda.max_memory_allocated(device))

    def bytes(self) -> int | None:
        """At the end of the call; None where it did not compute on a GPU."""
        if self._device is None:
            return None
        self._see(self._device)
        if self._around is not None and self._around._device == self._device:
            self._around._most = max(self._around._most, self._most)
        torch.cuda.reset_peak_memory_stats(self._device)
        return max(self._most - self._allocated, 0)
