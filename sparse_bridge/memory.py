"""A limit on memory: how much may be in use on a device while layers of the bridge compute in
inference. What keeps to it lies in `core.conv.row_blocks`.

A limit is the process's: memory is. Of several the lowest is in force, so that those of threads,
and of functions that call each other, may open and close in any order.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from types import TracebackType

from . import settings, state
from .errors import LifecycleError, SettingError

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
_lock = threading.Lock()
_open: list[int] = []
limit: int | None = None  # bytes; read by layers where they decide something anew
_highest = 0  # of the limits that were in force since the first of `_open` was opened
_before: dict[int, int] = {}  # the allocator's peaks of that moment, by GPU
_warned: set[int] = set()  # limits
_ROUNDED = 4 << 20  # by which torch's allocator, in large blocks, may exceed what layers ask for


def size_of(text: str | int) -> int:
    """Bytes of a size such as "8GiB", "512 MB" or 1 << 30.

    Raises: SettingError.
    """
    found = None
    if isinstance(text, int) and not isinstance(text, bool):
        found = text
    elif isinstance(text, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
        if parts is not None and parts[2].upper() in _UNITS:
            found = int(float(parts[1]) * _UNITS[parts[2].upper()])
    if found is None or found <= 0:
        raise SettingError(
            f"a memory limit is {text!r}; expected a size such as '8GiB' or '512MB', or a number of bytes, above 0."
        )
    return found


def shown(n_bytes: int) -> str:
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
    bridge's took more on a GPU, a RuntimeWarning says so in the end.

    Raises: SettingError for no size; inside of the block MemoryLimitError where a layer cannot do
    with so little.
    """

    def __init__(self, limit: str | int) -> None:
        self.limit = size_of(limit)
        self.entered = 0  # how often it is open

    def __enter__(self) -> memory_limit:
        _change(self, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _change(self, -1)

    def __repr__(self) -> str:
        return f"memory_limit({self.limit})"


def _change(one: memory_limit, step: int) -> None:
    """Open a limit once more, or close it once."""
    global limit, _highest, _before
    with _lock:
        if one.entered + step < 0:
            raise LifecycleError("a memory limit was closed that is not open.")
        one.entered += step
        if step > 0:
            if not _open:
                _highest, _before = 0, _peaks()
            _open.append(one.limit)
        else:
            _open.remove(one.limit)
        now = min(_open, default=None)
        if now != limit:
            limit = now
            settings.turn_to(None if now is None else ("memory limit", now))
        _highest = max(_highest, now or 0)
        exceeded = None if _open else _exceeded()
    if exceeded is not None:
        warnings.warn(exceeded, RuntimeWarning, stacklevel=3)


@state.owns
def reset() -> None:
    """Warn again of limits that were exceeded."""
    with _lock:
        _warned.clear()


def _peaks() -> dict[int, int]:
    """The most bytes that torch's allocator has had in use, by GPU; of a process that has begun to
    use one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {gpu: torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())}


def _exceeded() -> str | None:
    """The warning that a peak is above all limits that were in force, once for each.

    An earlier peak that was higher hides it: only the program may reset those statistics.
    """
    if _highest in _warned:
        return None
    for gpu, peak in _peaks().items():
        if peak > _highest + _ROUNDED and peak > _before.get(gpu, 0):
            _warned.add(_highest)
            return (
                f"under a memory limit of {shown(_highest)} the peak of cuda:{gpu} was "
                f"{shown(peak)}. Operations that the limit does not cut took it: torch's own "
                "layers, such as an MLP or a norm, or pools and depthwise layers. Give them the "
                "rows in parts; in training use sparse_bridge.checkpoint(module) instead of a "
                "limit (docs/deployment.md, Memory)."
            )
    return None
