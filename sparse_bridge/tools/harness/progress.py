"""Telling how far a run is: a rich progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """A context manager. `start` names what runs now, `done` says what came out.

    console: draw there, whatever it is; without one a bar is drawn where standard error is a
    terminal and rich is installed.  transient: the bar goes away at the end.
    """

    def __init__(self, total: int, what: str = "", console: Console | None = None, transient: bool = False) -> None:
        self._total, self._count = total, 0
        self._bar: Any = None
        if console is None and not sys.stderr.isatty():
            return
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:  # a bare GPU machine
            return
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=transient,
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def done(self, line: str = "") -> None:
        """One more of the total; `line` says what came out."""
        self._count += 1
        if line:
            self._print(line if self._bar is not None else f"[{self._count}/{self._total}] {line}")
        if self._bar is not None:
            self._bar.advance(self._task)

    def note(self, line: str, style: str = "yellow") -> None:
        """Something that belongs to no case, or needs attention."""
        self._print(line, style)

    def _print(self, line: str, style: str | None = None) -> None:
        if self._bar is None:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        else:
            self._bar.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
