"""Running cases: every peer in its own process, in turns, round by round."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sparse_bridge.tools.harness.progress import Progress

from .floor import Rates, layer_floor
from .processes import Worker, WorkerError, empty_caches
from .registry import WORKS, Case
from .results import Comparison, Figure, Run

__all__ = ["SKIPPED", "Limits", "Runner"]

_HELLO_SECONDS = 120  # importing torch and a library from a cold disk
_GRACE_SECONDS = 15  # a call that has begun may outlast the budget by this
_COLD_REPEATS = 2
SKIPPED = "skipped: no time left"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long things may take.

    Attributes:
        rounds: paired rounds per case.
        seconds: per peer and case, over all rounds.
        budget: of the whole run; what does not fit is listed as skipped.
        answer: for one answer of a peer, such as a first call that compiles and tunes.
    """

    rounds: int = 8
    seconds: float = 0.4
    budget: float = 220.0
    answer: float = 120.0


class Runner:
    """Fills a `Run` with the figures of cases."""

    def __init__(self, run: Run, limits: Limits, store: Callable[[], None] = lambda: None):
        """`store` is called after every case, so that an interrupted run leaves its figures."""
        self.run, self._limits, self._store = run, limits, store
        self._workers: dict[str, Worker] = {}
        self._broken: dict[str, str] = {}
        self._dtype = ""  # of the last case
        self._end = time.monotonic() + limits.budget

    def measure(self, cases: Sequence[Case]) -> None:
        """Time all cases as far as the budget allows."""
        with Progress(len(cases)) as progress:
            try:
                for case in cases:
                    progress.start(case.name)
                    figures = self._figures(case, progress)
                    self.run.figures += figures
                    self._store()
                    progress.done(_summary(case, figures))
            finally:
                self._close()

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _begin(self, dtype: str) -> None:
        """New processes for another dtype: peers remember what they tuned for one, and spconv runs
        in TF32 what it is to run in fp32 after that."""
        if dtype != self._dtype:
            self._close()
        self._dtype = dtype

    def _close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _figures(self, case: Case, progress: Progress) -> list[Figure]:
        self._begin(case.dtype)
        figures = {peer: _empty(case, peer) for peer in self.run.peers}
        for peer, figure in figures.items():
            figure.error = self._broken.get(peer)
        if self._left() <= 0:
            for figure in figures.values():
                figure.error = figure.error or SKIPPED
        elif case.cold:
            self._cold(case, figures)
        else:
            self._warm(case, figures, progress)
        return list(figures.values())

    # Workers that live for the whole run.

    def _worker(self, peer: str, case: Case, progress: Progress) -> Worker:
        """The process of a peer, started on demand; WorkerError if it cannot start."""
        if peer not in self._workers:
            worker = Worker(peer)
            try:
                hello = worker.ask("hello", _HELLO_SECONDS, device=case.device)
            except WorkerError as error:
                worker.close()
                if peer not in self.run.versions:  # it never ran
                    self._broken[peer] = f"does not start: {error}"
                    self.run.notes.append(f"{peer} {self._broken[peer]}")
                    progress.note(self.run.notes[-1])
                raise WorkerError(f"does not start: {error}") from error
            self.run.versions[peer] = hello["versions"]
            self._workers[peer] = worker
        return self._workers[peer]

    def _try(self, figure: Figure, call: Callable[[], Any]) -> Any:
        """The answer of a peer; a failure goes into the figure, and ends a process that is no
        longer to be trusted."""
        if figure.error is not None:
            return None
        try:
            return call()
        except WorkerError as error:
            figure.error = str(error)
            if not error.usable and figure.peer in self._workers:
                self._workers.pop(figure.peer).close()
            return None

    def _warm(self, case: Case, figures: dict[str, Figure], progress: Progress) -> None:
        for peer, figure in figures.items():
            count = all(one.pairs is None for one in figures.values())
            opened = self._try(
                figure, lambda peer=peer, count=count: self._open(self._worker(peer, case, progress), case, pairs=count)
            )
            if opened is not None:
                figure.rows, figure.first_s = opened["rows"], opened["first_s"]
                figure.pairs, figure.check = opened.get("pairs"), opened.get("check")
        if case.timed:
            self._rounds(figures)
        for peer, figure in figures.items():
            found = None
            if not case.timed or self._left() > 0:
                found = self._try(figure, lambda peer=peer: self._ask(peer, "memory"))
            if found:
                figure.peak_mb, figure.total_mb = found["peak_mb"], found["total_mb"]
                figure.held_mb, figure.busy_ms = found["held_mb"], found.get("busy_ms")
            self._try(figure, lambda peer=peer: self._ask(peer, "close"))
        self._add_floors(case, figures)

    def _open(self, worker: Worker, case: Case, **more: Any) -> dict[str, Any]:
        seconds = min(self._limits.answer, max(self._left(), 0.0) + _GRACE_SECONDS)
        return worker.ask("open", seconds, case=dataclasses.asdict(case), **more)

    def _ask(self, peer: str, op: str, **more: Any) -> dict[str, Any]:
        return self._workers[peer].ask(op, self._limits.answer, **more)

    def _rounds(self, figures: dict[str, Figure]) -> None:
        """Peers take turns; every other round in reverse, so that none always comes first."""
        seconds = self._limits.seconds / self._limits.rounds
        found: dict[str, list[list[float]]] = {peer: [] for peer in figures}
        begin, patience = time.monotonic(), 6 * self._limits.seconds * len(figures)
        for index in range(self._limits.rounds):
            for peer in sorted(figures, key=list(figures).index, reverse=bool(index % 2)):
                answer = self._try(figures[peer], lambda peer=peer: self._ask(peer, "round", seconds=seconds))
                if answer is not None:
                    found[peer].append(answer["ms"])
            spent = time.monotonic() - begin
            if self._left() <= 0 or (index >= 2 and spent > patience):
                break  # calls of seconds need no more rounds
        for peer, figure in figures.items():
            if figure.error is None:
                figure.add(found[peer])

    def _add_floors(self, case: Case, figures: dict[str, Figure]) -> None:
        """Pairs were counted by one peer; they and the floor belong to all."""
        pairs = next((one.pairs for one in figures.values() if one.pairs is not None), None)
        if pairs is None or not case.timed:
            return
        for figure in figures.values():
            figure.pairs = pairs
            if case.dtype not in self.run.rates:
                rates = self._try(
                    figure, lambda peer=figure.peer: self._ask(peer, "probe", dtype=case.dtype, device=case.device)
                )
                if rates is None:
                    continue
                self.run.rates[case.dtype] = rates
        rates = self.run.rates.get(case.dtype)
        if rates is not None:
            for figure in figures.values():
                figure.floor_ms = layer_floor(case.work, figure.rows, pairs, case.channels, case.dtype, Rates(**rates))

    # Workers that live for one call, with nothing compiled and nothing tuned.

    def _cold(self, case: Case, figures: dict[str, Figure]) -> None:
        """The first call with empty caches, then in a second process that finds them filled.

        `figures` holds the first process; the second one's are added to it under another name.
        """
        seconds: dict[str, list[list[float]]] = {}
        again = {peer: _second_process(figure) for peer, figure in figures.items()}
        for repeat in range(_COLD_REPEATS):
            if repeat and self._left() <= 0:
                break
            for peer, figure in figures.items():
                with tempfile.TemporaryDirectory() as folder:
                    environment = empty_caches(Path(folder))
                    for one in (figure, again[peer]):
                        if self._left() <= 0:
                            if not repeat:
                                one.error = one.error or SKIPPED
                            continue
                        one.error = one.error or figure.error
                        first = self._try(one, lambda e=environment, f=one: self._once(f, case, e))
                        if first is not None:
                            seconds.setdefault(one.case + one.peer, []).append([first * 1e3])
        for one in (*figures.values(), *again.values()):
            one.add(seconds.get(one.case + one.peer, []))
        figures.update({f"{peer} again": one for peer, one in again.items()})

    def _once(self, figure: Figure, case: Case, environment: dict[str, str]) -> float:
        """Seconds of the first call in a new process."""
        worker = Worker(figure.peer, environment)
        try:
            hello = worker.ask("hello", _HELLO_SECONDS, device=case.device)
            self.run.versions.setdefault(figure.peer, hello["versions"])
            opened = self._open(worker, case, pairs=False, warm=False)
        finally:
            worker.close()
        figure.rows, figure.first_s = opened["rows"], opened["first_s"]
        return opened["first_s"]


def _empty(case: Case, peer: str) -> Figure:
    return Figure(
        case.name,
        peer,
        case.suite,
        case.scene,
        case.subject,
        case.dtype,
        case.work,
        WORKS[case.work] + (", empty caches" if case.cold else ""),
        channels=case.channels,
    )


def _second_process(figure: Figure) -> Figure:
    label = figure.label.replace("empty caches", "second process")
    return dataclasses.replace(figure, case=figure.case + "-again", label=label)


def _summary(case: Case, figures: Sequence[Figure]) -> str:
    """One line: every peer's time or memory, or why there is none."""
    return f"{case.name}: " + ", ".join(_words(case, figures))


def _words(case: Case, figures: Sequence[Figure]) -> Iterator[str]:
    base = figures[0]
    for figure in figures:
        again = " (second process)" if figure.case != case.name else ""
        ratio = Comparison(base, [figure]).ratio(figure) if figure.case == base.case else None
        compared = f" ({ratio.median:.2f})" if ratio and figure is not base else ""
        if figure.error is not None:
            yield f"{figure.peer}{again} {figure.error}"
        elif figure.ms is not None:
            spread = f", p90 {figure.p90:.3f}" if case.streams and figure.p90 else ""
            busy = f", GPU {figure.busy_ms:.3f}" if figure.busy_ms else ""
            yield f"{figure.peer}{again} {figure.ms:.3f} ms{compared}{spread}{busy}"
        elif figure.memory_mb is not None:
            yield f"{figure.peer} {figure.memory_mb:.0f} MB"
