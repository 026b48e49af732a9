"""A limit on memory: how much may be in use on a device while layers of the bridge compute in
inference. What keeps to it lies in `core.conv.row_blocks`.

A limit is the process's: memory is. Of several the lowest is in force, so that those of threads,
and of functions that call each other, may open and close in any order.
"""

from __future__ import annotations

import re
import threading
from types import TracebackType

from . import settings
from .errors import LifecycleError, SettingError

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_lock = threading.Lock()
_open: list[int] = []
limit: int | None = None  # bytes; read by layers where they decide something anew


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
            f"a memory limit is {text!r}; expected a size such as '8GiB' or '512MB', or a number "
            "of bytes, above 0."
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
    `override_settings`; of several limits the lowest is in force.

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
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        _change(self, -1)

    def __repr__(self) -> str:
        return f"memory_limit({self.limit})"


def _change(one: memory_limit, step: int) -> None:
    """Open a limit once more, or close it once."""
    global limit
    with _lock:
        if one.entered + step < 0:
            raise LifecycleError("a memory limit was closed that is not open.")
        one.entered += step
        if step > 0:
            _open.append(one.limit)
        else:
            _open.remove(one.limit)
        now = min(_open, default=None)
        if now != limit:
            limit = now
            settings.turn_to(None if now is None else ("memory limit", now))
