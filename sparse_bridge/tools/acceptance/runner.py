"""Running the checks, each in turn: in this process, or on a GPU in one that may crash or hang.

    python -m sparse_bridge.tools.acceptance.runner DEVICE

is that process: it reads names of checks and answers their outcomes, line by line.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..harness.processes import Child, channel, write
from . import checks
from .setup import FAILED, SKIPPED, Outcome, Setup

Check = Callable[[Setup], Iterator[Outcome]]
CHECKS: dict[str, Check] = {
    name: getattr(importlib.import_module(f".{module}", __package__), function)
    for name, (module, function) in checks.CHECKS.items()
}
_PATIENCE = 30.0  # seconds that a process may take over the budget


def run(check: str, setup: Setup) -> Iterator[Outcome]:
    """The outcomes of one check, here; an exception is one that failed."""
    begin = time.perf_counter()
    try:
        for outcome in CHECKS[check](setup):
            now = time.perf_counter()
            yield dataclasses.replace(outcome, seconds=now - begin)
            begin = now
    # A proof goes on: compilers, drivers and frameworks raise what they like.
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0][:300]
        reason = f"{type(error).__name__}: {first}"
        yield Outcome(check, FAILED, reason, seconds=time.perf_counter() - begin)


def prove(
    setup: Setup, names: Sequence[str], minutes: float, begun: Callable[[str], object] = lambda name: None
) -> Iterator[Outcome]:
    """All outcomes, as they come. Checks that do not begin within `minutes` are skipped. begun: called with the name
    of each."""
    end = time.monotonic() + 60 * minutes
    process = SeparateProcess(setup) if setup.device.type == "cuda" else None
    try:
        for check in names:
            begun(check)
            if time.monotonic() > end:
                yield Outcome(check, SKIPPED, f"not begun within {minutes:g} minutes")
            elif process is None:
                yield from run(check, setup)
            else:
                yield from process.run(check, end + _PATIENCE - time.monotonic())
    finally:
        if process is not None:
            process.end()


class SeparateProcess:
    """Checks in a process of their own; one that crashed or hung is replaced."""

    def __init__(self, setup: Setup, module: str = __name__) -> None:
        self._module, self._arguments = module, [str(setup.device)]
        self._child: Child | None = None

    def run(self, check: str, patience: float) -> Iterator[Outcome]:
        """The outcomes of one check, which may take `patience` seconds."""
        begin = time.monotonic()
        child = self._child = self._child or Child(self._module, self._arguments)
        child.send(check=check)
        while True:
            try:
                answer: dict[str, Any] | None = child.receive(begin + patience - time.monotonic())
                problem = None if answer is not None else f"the process was {child.ending()}"
            except TimeoutError:
                answer, problem = None, f"no answer within {patience:.0f} s"
            if problem is not None:
                self.end()
                yield Outcome(check, FAILED, problem, seconds=time.monotonic() - begin)
                return
            assert answer is not None
            if answer.get("done"):
                return
            yield Outcome(**answer)

    def end(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end()
            self._child = None


def serve(device: str) -> None:
    """Answer the parent's requests until it closes the pipe."""
    answers = channel()
    setup = Setup.find(device)
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    for line in sys.stdin:
        for outcome in run(json.loads(line)["check"], setup):
            write(answers, **dataclasses.asdict(outcome))
        write(answers, done=True)


if __name__ == "__main__":
    serve(sys.argv[1])
