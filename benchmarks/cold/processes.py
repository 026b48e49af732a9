"""Compiling the forms of a first call by threads and by worker processes, on this CPU.

    python -m benchmarks.cold.processes unet:20000:60000 --threads 8

Per way, with empty caches: seconds until all forms are there, how long a thread that only counts
was kept from running in all (it wants the interpreter lock as a program's own thread does), the most
memory that the processes had at once, and what lies in Triton's cache afterwards. Kernels are not
loaded: there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from sparse_bridge.kernels.runtime import compile_processes
from sparse_bridge.workers import Workers

from .counting import Counted
from .first_calls import dry_run_of

WAYS = ("threads", "processes")
_STEP = 1e-3  # seconds of sleep; what is above was spent waiting for the lock, or for a core


class Stalls:
    """A thread that wakes up every millisecond; `seconds` of being late."""

    def __init__(self) -> None:
        self.seconds, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def _count(self) -> None:
        while not self._over.is_set():
            begin = time.perf_counter()
            time.sleep(_STEP)
            self.seconds += time.perf_counter() - begin - _STEP

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Memory:
    """The most MB that this process's descendants, and other processes of their sessions, had."""

    def __init__(self) -> None:
        self.most, self.processes, self._over = 0.0, 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.5):
            found = [size for pid in _descendants(os.getpid()) if (size := _proportional(pid))]
            self.most = max(self.most, sum(found) / 1024)
            self.processes = max(self.processes, len(found))

    __enter__, __exit__ = Stalls.__enter__, Stalls.__exit__


def _descendants(root: int) -> list[int]:
    found, waiting = [], [root]
    parents: dict[int, list[int]] = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(folder.name))
    while waiting:
        waiting += (children := parents.get(waiting.pop(), []))
        found += children
    return found


def _proportional(pid: int) -> int:
    """KB of a process; what it shares counts in parts."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _work(form: Counted, way: str) -> Callable[[], Any]:
    fn, driver = form.source.fn, form.driver
    if way == "threads":
        return lambda: driver.compile(form.source, target=driver.named, options=form.options)

    def compile_it() -> None:
        fn.compile = driver.compile  # as the binder sets it
        with compile_processes.worker_first(fn, begin=True):
            fn.compile(form.source, target=driver.named, options=form.options)

    return compile_it


def measure(forms: list[Counted], way: str, threads: int) -> dict[str, Any]:
    """Compile all forms in one of the `WAYS`."""
    pool, own = Workers(threads, way), list[float]()

    def timed(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            begin = time.thread_time()
            work()
            own.append(time.thread_time() - begin)

        return run

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
        mock.patch.object(compile_processes, "side_by_side", lambda: threads),
        mock.patch.object(compile_processes, "bind_to_device", lambda fn: None),
        Memory() as memory,
        Stalls() as stalls,
    ):
        begin = time.perf_counter()
        futures = [pool.submit(timed(_work(form, way))) for form in forms]
        # Python's parser may fail in several threads at once; launches compile such forms again.
        failed = sum(future.exception() is not None for future in futures)
        wall = time.perf_counter() - begin
        compile_processes.reset()
        kept = sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())
    pool.close()
    return {
        "way": way,
        "failed": failed,
        "wall": wall,
        "own": sum(own),
        "stalled": stalls.seconds,
        "children_mb": memory.most,
        "children": memory.processes,
        "disk_mb": kept / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold.processes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", nargs="?", default="unet:20000:60000:100000:30000")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    forms = list({e.key: e.form for e in dry_run_of(args.program, args.arch).firsts()}.values())
    print(f"{len(forms)} forms", file=sys.stderr)
    for way in args.ways:
        found = measure(forms, way, args.threads)
        print(
            f"{way}: {found['wall']:.1f} s, of processor time the threads took {found['own']:.1f}, "
            f"a counting thread stood {found['stalled']:.1f}; {found['children']} other processes "
            f"of {found['children_mb']:.0f} MB in all; {found['failed']} forms failed; "
            f"{found['disk_mb']:.1f} MB in Triton's cache",
            flush=True,
        )


if __name__ == "__main__":
    main()
