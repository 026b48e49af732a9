"""The process of one cell: runs its checks and reports each on standard output as a JSON line.

    python -m compat.worker TASK.json

TASK holds the cell, the checks still to run, and what earlier processes of the cell found.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import traceback

from sparse_bridge.tools.harness.processes import channel, write

from .bridged import NotRun, status
from .cellfile import from_json
from .checks import TABLE, Bench

__all__ = ["NEEDS", "attempt"]

# Without these a check says nothing of its own: it is not run where one has not passed.
NEEDS = {"import": (), "construct": ("import",), "forward": ("import", "construct")}
_NEEDS_OTHERS = ("import", "construct", "forward")
_REASON = 400  # characters of an error that go into the report


def attempt(bench: Bench, check: str) -> tuple[str, str]:
    """Outcome and reason (or remark) of one check."""
    lacking = [need for need in NEEDS.get(check, _NEEDS_OTHERS) if need not in bench.passed]
    if lacking:
        return "not run", f"{lacking[0]} has not passed"
    try:
        remark = TABLE[check](bench)
    except NotRun as reason:
        return "not run", str(reason)
    except Exception as error:
        traceback.print_exc()
        return "fail", _summary(error)
    bench.passed.add(check)
    return "pass", remark


def _summary(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    text = text if len(text) <= _REASON else text[:_REASON] + " ..."
    own = isinstance(error, AssertionError) and type(error) is AssertionError
    return text if own else f"{type(error).__name__}: {text}"


def main(task_path: str) -> None:
    """Run the checks of a task."""
    # Whatever models and libraries print goes to the log, not among the events.
    events = channel()
    task = json.loads(pathlib.Path(task_path).read_text())
    cell = from_json(task["cell"])
    bench = Bench(cell, task["native_python"], set(task["passed"]))
    if bench.passed:  # an earlier process of this cell has ended in the middle
        TABLE["import"](bench)
    for check in task["checks"]:
        write(events, check=check)
        start = time.perf_counter()
        outcome, reason = attempt(bench, check)
        seconds = round(time.perf_counter() - start, 2)
        write(events, check=check, outcome=outcome, reason=reason, seconds=seconds)
        if check == "import" and outcome == "pass":
            found = status(cell)
            write(events, mode=found.mode, version=found.version)


if __name__ == "__main__":
    main(sys.argv[1])
