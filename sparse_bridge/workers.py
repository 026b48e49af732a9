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

    after: others, which have nothing left to do whenever these begin with something. When the
    interpreter ends, what waits is dropped and what runs is finished. (`concurrent.futures` has its
    threads run all that waits first, which would keep a short script alive for seconds.)"""

    def __init__(self, threads: int, name: str, after: Workers | None = None) -> None:
        self._limit, self._name, self._after = threads, name, after
        self._queue: collections.deque[tuple[Future[Any], Work]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._news = threading.Condition()
        self._idle = 0
        self.closed = False

    def submit(self, work: Work) -> Future[Any]:
        """Run `work` in a thread; the future is cancelled where that will not happen."""
        future: Future[Any] = Future()
        with self._news:
            if self.closed:
                future.cancel()
                return future
            self._queue.append((future, work))
            if self._idle >= len(self._queue):
                self._news.notify_all()
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
            while self._queue:
                self._queue.popleft()[0].cancel()
            self._news.notify_all()
        for thread in self._threads:
            thread.join(timeout=30)

    def quiet(self, timeout: float) -> bool:
        """Wait for so many seconds until nothing is left to do; whether that is so."""
        with self._news:
            return self._news.wait_for(
                lambda: self.closed or (not self._queue and self._idle == len(self._threads)),
                timeout,
            )

    def _next(self) -> tuple[Future[Any], Work] | None:
        while True:
            with self._news:
                self._idle += 1
                self._news.notify_all()  # who waits for quiet
                self._news.wait_for(lambda: self._queue or self.closed)
                self._idle -= 1
                if self._after is None or not self._queue:
                    return self._queue.popleft() if self._queue else None
            while not (self.closed or self._after.quiet(0.1)):
                pass
            with self._news:
                if self._queue:
                    return self._queue.popleft()

    def _loop(self) -> None:
        while (found := self._next()) is not None:
            future, work = found
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                # Whoever waits for it gets it.
                except BaseException as error:
                    future.set_exception(error)
            del found, future, work  # or their tensors live until the next comes
