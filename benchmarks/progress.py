"""Telling how far a run is: a rich progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

__all__ = ["Progress"]


class Progress:
    """A context manager. `start` names what runs now, `done` says what came out."""

    def __init__(self, total: int):
        self._total, self._count, self._bar, self._task = total, 0, None, None
        if sys.stderr.isatty():
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:  # a bare GPU machine
                return
            self._bar = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def done(self, line: str) -> None:
        self._count += 1
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
            self._bar.advance(self._task)
        else:
            print(f"[{self._count}/{self._total}] {line}", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Something that belongs to no case."""
        if self._bar is not None:
            self._bar.console.print(line, style="yellow", markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
