"""When the launches of a first call could run on a machine with idle cores: from the order in which
forms are asked for and from the seconds that each takes to compile."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence

# Worker processes compile; asking one and loading what it made took the program's threads 0.6 of
# 22 s (sm_90, Triton 3.6: `processes`). Threads that compile themselves: 0.12 and more.
HELD = 0.03


@dataclasses.dataclass(frozen=True)
class Step:
    """A form that is handed to the threads (early), or a launch of it.  seconds: its compilation.
    part: of the program."""

    form: Hashable
    early: bool
    seconds: float
    part: str = ""


class _Threads:
    """Threads that compile what is handed in, first come, first served."""

    def __init__(self, count: int, held: float) -> None:
        self._free, self._held, self._lock = [0.0] * count, held, 0.0
        self._waiting: collections.deque[tuple[Step, float]] = collections.deque()
        self._done: dict[Hashable, float] = {}

    def submit(self, step: Step, now: float) -> None:
        self._waiting.append((step, now))

    def compile(self, step: Step, start: float) -> float:
        """When it is compiled by somebody who begins now."""
        held = step.seconds * self._held
        self._lock = max(self._lock, start) + held
        return self._lock + step.seconds - held

    def advance(self, now: float) -> None:
        """Begin what threads would have begun by now."""
        while self._waiting:
            step, submitted = self._waiting[0]
            place = min(range(len(self._free)), key=self._free.__getitem__)
            start = max(self._free[place], submitted)
            if start > now:
                return
            self._waiting.popleft()
            self._free[place] = self._done[step.form] = self.compile(step, start)

    def take(self, form: Hashable) -> float | None:
        """When a form is done that some thread has begun; one that waits is no longer theirs."""
        self._waiting = collections.deque(one for one in self._waiting if one[0].form != form)
        return self._done.get(form)


def timeline(steps: Sequence[Step], threads: int = 8, held: float = HELD) -> dict[str, float]:
    """Seconds at which the last launch of each part could run, with so many threads, each with a
    worker process, beside the program, whose own work takes no time here.  held: share of a
    compilation that holds the interpreter lock."""
    now, workers, ready, ends = 0.0, _Threads(threads, held), set[Hashable](), dict[str, float]()
    submitted = set[Hashable]()
    for step in steps:
        if step.form in ready or (step.early and step.form in submitted):
            continue
        if step.early:
            submitted.add(step.form)
            workers.submit(step, now)
            continue
        workers.advance(now)
        done = workers.take(step.form)
        now = max(now, done) if done is not None else workers.compile(step, now)
        ready.add(step.form)
        ends[step.part] = now
    return ends


def alone(steps: Sequence[Step], wanted: Callable[[Step], bool] = lambda step: True) -> float:
    """Seconds of all forms, one after another."""
    return sum({step.form: step.seconds for step in steps if wanted(step)}.values())
