"""Compiling kernels side by side, before they are wanted.

In a `dry_run()` the launches of this thread run nothing. Each form of a kernel that is not
compiled yet goes to a few threads, each of which has a worker process compile it
(`compile_processes`). A launch that wants such a form waits for the thread that has begun it, or
does without that thread where none has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from ...workers import Work, Workers
from .compile_processes import side_by_side

pool = Workers(side_by_side(), "sparse_bridge-compiler")
_local = threading.local()
dry_runs = 0  # in all threads; launches look at their thread only where there are any
_lock = threading.Lock()


@contextmanager
def dry_run(later: bool = False) -> Iterator[list[Future[Any]]]:
    """Launches of this thread compile in the background instead of running; the futures of those
    that have to. Memory that kernels would write stays as it was.  later: when nothing else is left
    to begin."""
    global dry_runs
    outer = getattr(_local, "futures", None)
    mine: list[Future[Any]] = [] if outer is None else outer
    with _lock:
        dry_runs += 1
    _local.futures, _local.later = mine, later
    try:
        yield mine
    finally:
        _local.futures, _local.later = outer, False
        with _lock:
            dry_runs -= 1


def futures() -> list[Future[Any]] | None:
    """Those of this thread's dry run; None outside one."""
    return getattr(_local, "futures", None) if dry_runs else None


def submit(work: Work) -> Future[Any]:
    """Compile in the background."""
    return pool.submit(work, getattr(_local, "later", False))
