"""Compiling ahead, in one thread beside the program."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable, Hashable, Sequence

import torch

from .. import log

__all__ = ["Compiler"]

_PENDING = 4  # buckets; each keeps its tensors alive until it is compiled


class Compiler:
    """Runs what has to be compiled once, on a stream of its own; results are thrown away."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_PENDING)
        self._done: dict[Hashable, threading.Event] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def takes(self, key: Hashable) -> bool:
        """Whether `submit` would do anything."""
        return key not in self._done and not self._closed and not self._queue.full()

    def ready(self, key: Hashable) -> bool:
        """Whether what was submitted as `key` has run."""
        done = self._done.get(key)
        return done is not None and done.is_set()

    def wait(self, key: Hashable, seconds: float) -> bool:
        """`ready`, after waiting for it."""
        return key in self._done and self._done[key].wait(seconds)

    def submit(
        self, key: Hashable, device: torch.device, runs: Sequence[Callable[[], object]]
    ) -> None:
        """Run each of `runs` once, later. Nothing happens if `key` is known or the queue is full;
        a later call may have more luck."""
        with self._lock:
            if key in self._done or self._closed:
                return
            ready = None
            if device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(device))
            done = threading.Event()

            def work() -> None:
                try:
                    self._work(device, ready, runs)
                finally:
                    done.set()

            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(work)
                self._done[key] = done
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="sparse_bridge-compiler", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)

    def close(self) -> None:
        """Drop what waits, finish what runs."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # or its tensors live until the next one comes

    def _work(
        self,
        device: torch.device,
        ready: torch.cuda.Event | None,
        runs: Sequence[Callable[[], object]],
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if device.type == "cuda":
                stream = torch.cuda.Stream(device)
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
                if ready is not None:
                    stream.wait_event(ready)
                stack.callback(stream.synchronize)
            for run in runs:
                if self._closed:
                    return
                try:
                    run()
                # Whatever a candidate's compiler raises: it loses when it is timed.
                except Exception as error:
                    log.logger.debug("a tile candidate does not compile: %s", error)
