"""A limit on memory: how much may be in use on a device while layers of the bridge compute in
inference. What keeps to it lies in `core.conv.row_blocks`.

A limit is the process's: memory is. Of several the lowest is in force, so that those of threads,
and of functions that call each other, may open and close in any order.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sys
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from . import log, settings
from .errors import LifecycleError, MemoryLimitError, SettingError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_lock = threading.RLock()  # collected garbage may close a limit while another one is looked at
_open: list[int] = []
limit: int | None = None  # bytes; read by layers where they decide something anew
_peaks: dict[int, int] = {}  # the most that torch's allocator had in use, by GPU, when it was last read
_excess: MemoryLimitError | None = None  # that nobody was told of
_ROUNDED = 4 << 20  # by which torch's allocator, in large blocks, may exceed what layers ask for


def size_of(text: str | float) -> int:
    """Bytes of a size such as "8GiB", "512 MB", 1 << 30 or 1e9.

    Raises: SettingError.
    """
    n_bytes = None
    if isinstance(text, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
        if parts is not None and parts[2].upper() in _UNITS:
            n_bytes = int(float(parts[1]) * _UNITS[parts[2].upper()])
    elif isinstance(text, float):
        n_bytes = int(text) if text.is_integer() else None
    elif not isinstance(text, bool):
        with contextlib.suppress(TypeError):
            n_bytes = operator.index(text)
    if n_bytes is None or n_bytes <= 0:
        raise SettingError(
            f"a memory limit is {text!r}; expected a size such as '8GiB' or '512MB', or a number of bytes, above 0."
        )
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """A size for people, and exactly."""
    for unit in ("GiB", "MiB", "KiB"):
        if n_bytes >= _UNITS[unit.upper()]:
            return f"{n_bytes / _UNITS[unit.upper()]:.2f} {unit} ({n_bytes} bytes)"
    return f"{n_bytes} bytes"


class memory_limit:  # read as a function, like `torch.no_grad`
    """Keep memory under `limit` for the length of a `with` block, in inference.

    with sparse_bridge.memory_limit("8GiB"), torch.no_grad():
        y = model(x)

    Convolutions that would take more compute their rows in blocks, with the same bits, and maps
    that can be built again are dropped. Counted is `torch.cuda.memory_allocated` on GPUs, and on
    the CPU what a layer reads, writes and needs meanwhile, and maps. Process-wide, like
    `override_settings`; of several limits the lowest is in force. Where other operations than the
    bridge's took more on a GPU, the next layer says so, or the end of the block.

    Raises: SettingError for no size; inside of the block, and where it ends without another
    exception, MemoryLimitError, whose `least` is the limit that would have done.
    """

    def __init__(self, limit: str | float) -> None:
        self.limit = size_of(limit)
        self.entered = 0  # how often it is open

    def __enter__(self) -> memory_limit:
        with _lock:
            if not _open:
                _peaks.clear()
            _read_peaks(_gpus())
            self.entered += 1
            _open.append(self.limit)
            _turn()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        excess = _close(self)
        if excess is None:
            return
        if error is None:
            raise excess
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(str(excess))

    def __repr__(self) -> str:
        return f"memory_limit({self.limit})"


def _close(opened: memory_limit) -> MemoryLimitError | None:
    """What exceeded a limit, and nobody was told of."""
    with _lock:
        if not opened.entered:
            raise LifecycleError("a memory limit was closed that is not open.")
        try:
            _read_peaks(_gpus())
        finally:  # an allocator may have no statistics
            opened.entered -= 1
            _open.remove(opened.limit)
            _turn()
        return _take_excess()


def leave(opened: memory_limit) -> None:
    """Close it where no block ends: a RuntimeWarning says what exceeded it."""
    excess = _close(opened)
    if excess is not None:
        log.warn(str(excess), RuntimeWarning)


def _turn() -> None:
    """Put the lowest of the open limits in force."""
    global limit
    now = min(_open, default=None)
    if now != limit:
        limit = now
        settings.turn_to(None if now is None else ("memory limit", now))


def check(gpu: int) -> None:
    """Say what came above the limit on a GPU since somebody asked last. Waits for nothing, and
    leaves the allocator's statistics as they are.

    Raises: MemoryLimitError.
    """
    with _lock:
        _read_peaks((gpu,))
        excess = _take_excess()
    if excess is not None:
        raise excess


def allocated(torch_device: Any, device: Any) -> tuple[int, int]:
    """(bytes in use on a device, the most that were), as torch's allocator counts them.

    torch_device: `torch.cuda`, or another module of its kind. Its `memory_allocated` sorts a
    hundred numbers for one, which takes longer than a layer may (85 us).
    """
    counted = torch_device.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return counted["current"], counted["peak"]


def _gpus() -> Iterable[int]:
    """Of a process that has begun to use one: asking another would."""
    torch = sys.modules.get("torch")
    return range(torch.cuda.device_count()) if torch is not None and torch.cuda.is_initialized() else ()


def _read_peaks(gpus: Iterable[int]) -> None:
    """Keep the excess, if a peak came above the limit since it was last read.

    When a peak was reached is not known, and only the program may reset it: one of before the
    limit, if higher, hides others. A peak that fell was reset, so what it is now is new.
    """
    global _excess
    for gpu in gpus:
        last_peak, peak = _peaks.get(gpu, 0), allocated(sys.modules["torch"].cuda, gpu)[1]
        _peaks[gpu] = peak
        if limit is None or peak == last_peak or peak <= limit + _ROUNDED:
            continue
        if _excess is None or peak > _excess.least:
            _excess = _excess_of(gpu, peak, limit)


def _take_excess() -> MemoryLimitError | None:
    global _excess
    excess, _excess = _excess, None
    return excess


def _excess_of(gpu: int, peak: int, under: int) -> MemoryLimitError:
    return MemoryLimitError(
        f"under a memory limit of {format_bytes(under)} the peak of cuda:{gpu} was {format_bytes(peak)}. "
        "Operations that the limit does not cut took it: torch's own layers, such as an MLP or a "
        f"norm, or pools and depthwise layers. Give them the rows in parts, raise the limit to {peak} "
        "bytes or more, or use smaller batches; in training use sparse_bridge.checkpoint(module) "
        "instead of a limit (docs/memory.md).",
        under,
        peak,
        peak,
    )
