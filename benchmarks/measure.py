"""Clocks and memory gauges of a device. Times are wall-clock unless said otherwise, and
end with the device idle."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .works import Work

__all__ = ["busy_time", "first_call", "issue_times", "kept_memory", "peak_memory", "synchronize", "times"]

MB = 1 << 20
_CALLS_IN_FLIGHT = 40  # below the length of a GPU's launch queue, so that the host never waits
_MOST_SAMPLES = 50  # of one round
_PROFILED_CALLS = 6  # even: scenes of a stream come from two scans in turns
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_call(work: Work, device: torch.device) -> tuple[float, torch.Tensor]:
    """Seconds of a call, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = work.run()
    synchronize(device)
    return time.perf_counter() - start, result


def times(
    work: Work,
    device: torch.device,
    seconds: float,
    settle: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Milliseconds of one or more calls, started until `seconds` have passed.

    `settle`: an untimed call comes first, since another process may have had the device. `clock`:
    `time.process_time` for calls on one thread of a CPU, which other programs then do not lengthen.
    """
    begin = time.perf_counter()
    if settle:
        first_call(work, device)
    found: list[float] = []
    while len(found) < _MOST_SAMPLES and (not found or time.perf_counter() - begin < seconds):
        work.prepare()
        synchronize(device)
        start = clock()
        work.run()
        synchronize(device)
        found.append((clock() - start) * 1e3)
    return found


def issue_times(work: Work, device: torch.device, seconds: float, settle: bool = True) -> list[float]:
    """Milliseconds of host time per part of a call: until it returns, the device still working.

    Calls of one part are issued in a row; a call of many parts alone.
    """
    calls = 1 if work.parts > 1 else _CALLS_IN_FLIGHT
    begin = time.perf_counter()
    if settle:
        first_call(work, device)
    found: list[float] = []
    while len(found) < _MOST_SAMPLES and (not found or time.perf_counter() - begin < seconds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            work.run()
        found.append((time.perf_counter() - start) * 1e3 / (calls * work.parts))
    synchronize(device)
    return found


def busy_time(work: Work, device: torch.device) -> float | None:
    """Milliseconds in which a GPU works on a call, median of a few calls; None elsewhere.

    Wall time over it says how much of the GPU the host wastes; 1.0 is the limit.
    """
    if device.type != "cuda":
        return None
    found = []
    for _ in range(_PROFILED_CALLS):
        work.prepare()
        synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work.run()
            synchronize(device)
        found.append(_covered(profile.events()) / 1e3)
    return statistics.median(found)


def _covered(events: Iterable[Any]) -> float:
    """Microseconds that the device's part of `events` covers, overlaps counted once."""
    spans = sorted(
        (one.time_range.start, one.time_range.end)
        for one in events
        if one.device_type == torch.autograd.DeviceType.CUDA
    )
    total, end = 0.0, -math.inf
    for start, stop in spans:
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def peak_memory(work: Work, device: torch.device, calls: int = 1) -> tuple[float, float] | None:
    """MB that a call needs on top of its inputs and weights, and MB in all, at most of so many.

    CUDA: what torch's allocator handed out. Linux: resident memory of the process. Elsewhere None.
    """
    found = []
    for _ in range(calls):
        work.prepare()
        work.clear()
        gc.collect()
        synchronize(device)
        try:
            found.append(_gpu_peak(work, device) if device.type == "cuda" else _host_peak(work))
        except OSError:
            return None
    return max(need for need, _ in found) / MB, max(total for _, total in found) / MB


def _gpu_peak(work: Work, device: torch.device) -> tuple[int, int]:
    """Bytes of a call on top of what was there, and in all."""
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)
    work.run()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return max(peak - base, 0), peak


def _host_peak(work: Work) -> tuple[int, int]:
    """The same of the process. Raises OSError where Linux's files are not there."""
    _return_freed_memory()
    _CLEAR.write_text("5")  # forget the high-water mark
    base = _resident("VmRSS")
    work.run()
    peak = _resident("VmHWM")
    return max(peak - base, 0), peak


def kept_memory(device: torch.device) -> float | None:
    """MB that torch's allocator cannot give back to a GPU, captured graphs included; elsewhere
    None."""
    if device.type != "cuda":
        return None
    gc.collect()
    synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) / MB


def _return_freed_memory() -> None:
    """What the C library keeps for reuse would hide what a call needs."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"{_STATUS} has no {field}")
