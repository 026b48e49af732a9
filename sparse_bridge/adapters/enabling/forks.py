"""Children by fork compute on the CPU, too.

GNU's OpenMP, that of torch on Linux, keeps its threads between two operations. A child by fork has
none of them, and waits for them for ever in its first operation that is large enough for threads.
Programs meet that more often here than with frameworks whose CPU code is their own: it is torch's
here. Without threads at the fork, parent and child start new ones.
"""

from __future__ import annotations

import contextlib
import ctypes

_SOFT = 1  # omp_pause_soft: threads end, settings stay
_MAPS = "/proc/self/maps"


def end_threads() -> None:
    """End the threads of OpenMP that wait for this thread's next operation."""
    for path in _libraries():
        with contextlib.suppress(OSError, AttributeError):  # GCC's before 9 have no such function
            ctypes.CDLL(path).omp_pause_resource_all(_SOFT)


def _libraries() -> set[str]:
    """The files of GNU's OpenMP that are loaded: torch's, and those that other packages bring."""
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n") for line in file if "libgomp" in line]
    except OSError:
        return set()
    return {line.split(maxsplit=5)[-1] for line in lines}
