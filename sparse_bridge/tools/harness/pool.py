"""Calls in several worker processes; one that crashes costs the call that it was making.

    python -m sparse_bridge.tools.harness.pool

is a worker: it reads calls, pickled, and answers what they return or raise.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .processes import Child, channel, write

_PATIENCE = 10.0  # seconds that a worker without work may take to end


class CrashedError(RuntimeError):
    """The process that made a call ended before it had answered; the message says how."""


class Pool:
    """A context manager with at most `processes` workers, each started when there is work for it.

    Left by an exception, such as Ctrl-C, it drops what waits and kills what runs.
    """

    def __init__(self, processes: int) -> None:
        self._threads = ThreadPoolExecutor(processes)
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._lock, self._over = threading.Lock(), False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._over = error_type is not None
            for child in self._busy if self._over else ():
                child.kill()
        self._threads.shutdown(cancel_futures=self._over)
        for child in self._idle:
            child.end(_PATIENCE)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """`function(*arguments)` in a worker; both can be pickled, as can what comes of them. Its
        exceptions are the future's, and CrashedError."""
        return self._threads.submit(self._call, function, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            if self._over:
                raise CrashedError("not begun: the run has been stopped")
            child = self._idle.pop() if self._idle else Child(__name__)
            self._busy.add(child)
        answer = None
        try:
            child.send(call=_packed((function, arguments)))
            answer = child.receive(threading.TIMEOUT_MAX)
            ending = "" if answer else child.ending()
        finally:
            with self._lock:
                self._busy.remove(child)
                if answer:
                    self._idle.append(child)
            if not answer:
                child.end()
        if not answer:
            raise CrashedError(f"the process was {ending}")
        if "raised" in answer:
            raise _unpacked(answer["raised"]) from RuntimeError(answer["trace"])
        return _unpacked(answer["returned"])


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _answer(call: str) -> dict[str, str]:
    try:
        function, arguments = _unpacked(call)
        return {"returned": _packed(function(*arguments))}
    # Whatever a call raises is its caller's.
    except Exception as error:
        trace = traceback.format_exc()
        try:
            raised = _packed(error)
            _unpacked(raised)
        except Exception:  # some exceptions do not survive the way
            raised = _packed(RuntimeError(f"{type(error).__name__}: {error}"))
        return {"raised": raised, "trace": trace}


if __name__ == "__main__":
    answers = channel()
    for line in sys.stdin:
        write(answers, **_answer(json.loads(line)["call"]))
