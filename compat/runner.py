"""Runs cells: a process each, watched, restarted after a crash, and its answers judged."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from .cellfile import to_json
from .matrix import CHECKS, Cell
from .results import CellResult, CheckResult

__all__ = ["Options", "run_all", "run_cell"]

_START = 120.0  # seconds in which a process has to begin: it imports torch
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit|Fault)\b.*|^Fatal Python error.*")

_running: set[subprocess.Popen[str]] = set()
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
            _end(child)
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
            ending = ending or f"ended early: {_last_error(log)}"
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
    return CellResult(
        model.number,
        model.name,
        model.framework,
        cell.device,
        cell.dtype,
        found.mode,
        cell.size,
        checks,
    )


def _process(
    cell: Cell, checks: list[str], found: _Found, options: Options, folder: pathlib.Path
) -> str:
    """One process, until it ends or a check takes too long; why it ended early, or ""."""
    passed = [name for name, result in found.done.items() if result.outcome == "pass"]
    task = {"cell": to_json(cell), "checks": checks, "passed": passed}
    task["native_python"] = options.native_python
    path = folder / "task.json"
    path.write_text(json.dumps(task))
    with (folder / "log.txt").open("a") as log:
        child = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "compat.worker", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **cell.model.environment},
            start_new_session=True,
        )
        _running.add(child)
        found.since = time.monotonic()
        try:
            ended = _follow(child, found, options.limit)
        finally:
            _end(child)
            _running.discard(child)
            code = child.wait()
    if not ended:
        return f"timed out after {options.limit:g} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}: {_last_error(folder / 'log.txt')}"
    return ""


def _end(child: subprocess.Popen[str]) -> None:
    """Kill a child and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _follow(child: subprocess.Popen[str], found: _Found, limit: float) -> bool:
    """Take the child's events until it closes its end; False if a check takes too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            allowed = limit if found.running else max(limit, _START)
            line = lines.get(timeout=max(found.since + allowed - time.monotonic(), 0.01))
        except queue.Empty:
            return False
        if line is None:
            child.wait()
            return True
        found.take(json.loads(line))
        found.since = time.monotonic()


def _last_error(log: pathlib.Path) -> str:
    """The last line that names an error, or just the last line."""

    def lines() -> Iterator[str]:
        text = log.read_text(errors="replace") if log.exists() else ""
        yield from (line.strip() for line in reversed(text.splitlines()) if line.strip())

    named = next((line for line in lines() if _ERROR_LINE.match(line)), None)
    return named or next(lines(), "nothing printed")


def _judged(cell: Cell, mode: str, result: CheckResult) -> CheckResult:
    """The result in the light of what the matrix expects."""
    known = [one for one in cell.model.expect if one.applies(result.check, cell, mode)]
    if not known or result.outcome == "not run":
        return result
    if result.outcome == "pass":
        reason = f"passed, but the matrix expects {known[0].outcome}: {known[0].reason}"
        return dataclasses.replace(result, outcome="fail", reason=reason)
    return dataclasses.replace(
        result, outcome=known[0].outcome, reason=known[0].reason, expected=True
    )
