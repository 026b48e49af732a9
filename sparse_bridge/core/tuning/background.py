"""Compiling ahead, in one thread beside the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, TimeoutError

import torch

from ... import log
from ...workers import Workers

_PENDING = 4  # buckets; each keeps its tensors alive until it is compiled


class Compiler:
    """Runs what has to be compiled once, on a stream of its own; results are thrown away."""

    def __init__(self) -> None:
        self._workers = Workers(1, "sparse_bridge-tuner")
        self._runs: dict[Hashable, Future[None]] = {}

    def takes(self, key: Hashable) -> bool:
        """Whether `submit` would do anything."""
        waiting = sum(not run.done() for run in list(self._runs.values()))
        return key not in self._runs and not self._workers.closed and waiting < _PENDING

    def has_run(self, key: Hashable) -> bool:
        """Whether what was submitted as `key` has run."""
        return self.wait(key, 0)

    def wait(self, key: Hashable, seconds: float) -> bool:
        """`has_run`, after waiting for it."""
        run = self._runs.get(key)
        if run is None or run.cancelled():
            return False
        with contextlib.suppress(TimeoutError):
            run.exception(seconds)
            return True
        return False

    def submit(self, key: Hashable, device: torch.device, runs: Sequence[Callable[[], object]]) -> None:
        """Run each of `runs` once, later. Nothing happens if `key` is known or much waits already;
        a later call may have more luck."""
        if not self.takes(key):
            return
        submitted = None
        if device.type == "cuda":
            submitted = torch.cuda.Event()
            submitted.record(torch.cuda.current_stream(device))
        self._runs[key] = self._workers.submit(lambda: self._work(device, submitted, runs))

    def close(self) -> None:
        """Drop what waits, finish what runs."""
        self._workers.close()

    def _work(
        self, device: torch.device, submitted: torch.cuda.Event | None, runs: Sequence[Callable[[], object]]
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if device.type == "cuda":
                stream = torch.cuda.Stream(device)
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
                if submitted is not None:
                    stream.wait_event(submitted)
                stack.callback(stream.synchronize)
            for run in runs:
                if self._workers.closed:
                    return
                try:
                    run()
                # Whatever a candidate's compiler raises: it loses when it is timed.
                except Exception as error:
                    log.logger.debug("a tile candidate does not compile: %s", error)
