"""Runs cells: a process each, watched, restarted after a crash, and its answers judged."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from sparse_bridge.tools.harness.processes import Child

from .cellfile import to_json
from .matrix import CHECKS, Cell
from .results import CellResult, CheckResult

__all__ = ["Options", "run_all", "run_cell"]

_START = 120.0  # seconds in which a process has to begin: it imports torch

_running: set[Child] = set()
_stopped = threading.Event()


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run. limit: seconds that one check may take; logs: where to keep what cells print."""

    checks: Sequence[str] = CHECKS
    limit: float = 300.0
    native_python: str = ""
    logs: pathlib.Path | None = None


@dataclasses.dataclass
class _Found:
    """What the processes of one cell have reported so far."""

    mode: str
    done: dict[str, CheckResult] = dataclasses.field(default_factory=dict)
    running: str | None = None
    since: float = 0.0

    def take(self, event: dict) -> None:
        if "outcome" in event:
            self.done[event["check"]] = CheckResult(**event)
            self.running = None
        elif "check" in event:
            self.running, self.since = event["check"], time.monotonic()
        else:
            self.mode = event["mode"]


def run_all(
    cells: Sequence[Cell],
    options: Options,
    jobs: int = 1,
    started: Callable[[Cell], None] = lambda cell: None,
    finished: Callable[[Cell, CellResult], None] = lambda cell, result: None,
) -> list[CellResult]:
    """Run cells, `jobs` at a time; the callbacks come from the workers' threads."""

    def one(cell: Cell) -> CellResult:
        started(cell)
        result = run_cell(cell, options)
        finished(cell, result)
        return result

    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        return list(pool.map(one, cells))
    except BaseException:  # the user's Ctrl-C above all: no process may stay behind
        _stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for child in list(_running):
            child.kill()
        raise
    finally:
        pool.shutdown()
        _stopped.clear()


def run_cell(cell: Cell, options: Options) -> CellResult:
    """Run the checks of one cell in a fresh process; a new one follows where it dies."""
    found = _Found(mode=cell.mode)
    wanted = [check for check in CHECKS if check in options.checks or check in CHECKS[:3]]
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.txt"
        while rest := [check for check in wanted if check not in found.done]:
            if _stopped.is_set():
                raise KeyboardInterrupt
            ending = _process(cell, rest, found, options, pathlib.Path(folder))
            if found.running:
                seconds = round(time.monotonic() - found.since, 2)
                found.done[found.running] = CheckResult(found.running, "fail", ending, seconds)
                found.running = None
            elif rest[0] not in found.done:  # it did not get as far as a check
                found.done[rest[0]] = CheckResult(rest[0], "fail", ending)
                for check in rest[1:]:
                    found.done[check] = CheckResult(check, "not run", f"{rest[0]} has not passed")
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "_", cell.title)
            (options.logs / f"{name}.log").write_text(log.read_text(errors="replace"))
    checks = tuple(_judged(cell, found.mode, found.done[check]) for check in wanted)
    model = cell.model
    return CellResult(model.number, model.name, model.framework, cell.device, cell.dtype, found.mode, cell.size, checks)


def _process(cell: Cell, checks: list[str], found: _Found, options: Options, folder: pathlib.Path) -> str:
    """One process, until it ends or a check takes too long; how it ended."""
    passed = [name for name, result in found.done.items() if result.outcome == "pass"]
    task = {"cell": to_json(cell), "checks": checks, "passed": passed}
    task["native_python"] = options.native_python
    path = folder / "task.json"
    path.write_text(json.dumps(task))
    environment = {**os.environ, **cell.model.environment}
    child = Child("compat.worker", [str(path)], environment, folder / "log.txt")
    _running.add(child)
    found.since = time.monotonic()
    try:
        while True:
            allowed = options.limit if found.running else max(options.limit, _START)
            event = child.receive(found.since + allowed - time.monotonic())
            if event is None:
                break
            found.take(event)
            found.since = time.monotonic()
        return child.ending()
    except TimeoutError:
        return f"timed out after {options.limit:g} s"
    finally:
        _running.discard(child)
        child.end()


def _judged(cell: Cell, mode: str, result: CheckResult) -> CheckResult:
    """The result in the light of what the matrix expects."""
    known = [one for one in cell.model.expect if one.applies(result.check, cell, mode)]
    if not known or result.outcome == "not run":
        return result
    if result.outcome == "pass":
        reason = f"passed, but the matrix expects {known[0].outcome}: {known[0].reason}"
        return dataclasses.replace(result, outcome="fail", reason=reason)
    return dataclasses.replace(result, outcome=known[0].outcome, reason=known[0].reason, expected=True)
