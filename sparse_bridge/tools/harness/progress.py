"""Telling how far a run is: a rich progress bar on a terminal, plain lines on standard error elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SILENCE = 10.0  # seconds after which a run without a terminal says what it does


class Progress:
    """A context manager. `start` names what runs now, `done` says what came out.

    total: of what is counted; 1: nothing is.  console: a bar is drawn there where it is a terminal; without one
    on standard error, where rich is installed.  transient: the bar goes away at the end.  Elsewhere a line says
    what runs whenever nothing was said for `SILENCE`; a run that is shorter says nothing.
    """

    def __init__(self, total: int, what: str = "", console: Console | None = None, transient: bool = False) -> None:
        self._total, self._count, self._what = total, 0, what
        self._begin = self._last = time.monotonic()
        self._ended = threading.Event()
        self._bar: Any = None
        if not (sys.stderr.isatty() if console is None else console.is_terminal):
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
            console=console or Console(stderr=True, emoji=False),
            transient=transient,
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        else:
            threading.Thread(target=self._tell, name="sparse_bridge progress", daemon=True).start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str) -> None:
        self._what = what
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

    def _tell(self) -> None:
        while not self._ended.wait(max(self._last + SILENCE - time.monotonic(), 0.01)):
            if time.monotonic() >= self._last + SILENCE:
                counted = f"{self._count} of {self._total} done, " if self._total > 1 else ""
                self._print(f"{self._what or 'running'} ({counted}{time.monotonic() - self._begin:.0f} s)")

    def _print(self, line: str, style: str | None = None) -> None:
        self._last = time.monotonic()
        if self._bar is None:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        else:
            self._bar.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
