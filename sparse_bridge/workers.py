"""Threads for work beside the program."""

from __future__ import annotations

import atexit
import collections
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Work = Callable[[], Any]

WAIT_POLICY = "OMP_WAIT_POLICY"


def wait_passively() -> None:
    """Let torch's CPU threads sleep while they wait, unless the user says otherwise.

    They spin by default: with any other load on the machine a layer, which is many short parallel
    regions, takes several times as long. The policy is read once, when torch is imported.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(WAIT_POLICY, "passive")


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Daemon threads that run what is submitted, first come, first served.

    When the interpreter ends, what waits is dropped and what runs is finished.
    (`concurrent.futures` has its threads run all that waits first, which would keep a short script
    alive for seconds.)
    """

    def __init__(self, threads: int, name: str) -> None:
        self._limit, self._name = threads, name
        self._queue: collections.deque[tuple[Future[Any], Work]] = collections.deque()
        self._later: collections.deque[tuple[Future[Any], Work]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._news = threading.Condition()
        self._idle = 0
        self.closed = False

    def submit(self, work: Work, later: bool = False) -> Future[Any]:
        """Run `work` in a thread; the future is cancelled where that will not happen.  later: when
        nothing else waits."""
        future: Future[Any] = Future()
        with self._news:
            if self.closed:
                future.cancel()
                return future
            (self._later if later else self._queue).append((future, work))
            if self._idle >= len(self._queue) + len(self._later):
                self._news.notify()
            elif len(self._threads) < self._limit:
                self._start()
        return future

    def _start(self) -> None:
        if not self._threads:
            atexit.register(self.close)
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Drop what waits, finish what runs."""
        with self._news:
            self.closed = True
            for waiting in (self._queue, self._later):
                while waiting:
                    waiting.popleft()[0].cancel()
            self._news.notify_all()
        for thread in self._threads:
            thread.join(timeout=30)

    def _next(self) -> tuple[Future[Any], Work] | None:
        with self._news:
            self._idle += 1
            self._news.wait_for(lambda: self._queue or self._later or self.closed)
            self._idle -= 1
            waiting = self._queue or self._later
            return waiting.popleft() if waiting else None

    def _loop(self) -> None:
        while (task := self._next()) is not None:
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                # Whoever waits for it gets it.
                except BaseException as error:
                    future.set_exception(error)
            del task, future, work  # or their tensors live until the next comes
