"""The report of `python -m sparse_bridge run`: on a program and its child processes."""

from __future__ import annotations

import atexit
import importlib
import pathlib
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

from ..tools.harness import results

if TYPE_CHECKING:
    from ..adapters.lifecycle import Handle
    from ..tools.profiling.recorder import ModelProfile

_SCHEMA = 1  # of the file


class ProgramReport:
    """Made when the program has ended, or where it leaves child processes that still work, when
    these have.

    shown: it is printed to stderr.  file: where it is written as JSON.  profiled: so many calls of
    outermost modules are profiled, which is shown, and written, too.
    counts: the folder to which children write what their layers count; "" where nobody asks.
    """

    def __init__(self, shown: bool, file: pathlib.Path | None, profiled: int = 0) -> None:
        self._shown, self._file, self._profiled = shown, file, profiled
        self._handle: Handle | None = None
        self._profile: ModelProfile | None = None
        self.counts = ""
        if shown or file is not None or profiled:
            self.counts = tempfile.mkdtemp(prefix="sparse_bridge-")
            # Python waits for children in a function that multiprocessing registers later, and
            # calls what was registered first last.
            atexit.register(self.close)

    def of(self, handle: Handle) -> None:
        """Report what happens from now on, while `handle` holds its frameworks."""
        self._handle = handle
        if self._profiled:
            from ..tools.profiling.recorder import ModelProfile

            # Without memory: programs read the peak that it would reset.
            self._profile = ModelProfile(memory=False, calls=self._profiled).start()

    def program_ended(self) -> None:
        """The program's own code is done."""
        if not _children_at_work():
            self.close()
        elif self._handle is not None:
            # All that a report imports: torch and rich cannot be once Python has begun to end.
            importlib.import_module("rich.console")
            str(self._handle.report())

    def close(self) -> None:
        """Report, once.

        Raises:
            OSError: the file cannot be written.
        """
        counts, self.counts = self.counts, ""
        if not counts:
            return
        try:
            if self._handle is not None:
                self._report(self._handle, counts)
        finally:
            shutil.rmtree(counts, ignore_errors=True)

    def _report(self, handle: Handle, counts: str) -> None:
        from ..adapters.enabling import child_counts

        report = child_counts.added_to(handle.report(), counts)
        facts, texts = report.to_dict(), [str(report)] if self._shown else []
        if self._profile is not None:
            self._profile.stop()
            facts["profile"] = self._profile.to_dict()
            texts.append(str(self._profile))
        if texts:
            sys.stdout.flush()
            sys.stderr.write("\n".join(texts) + "\n")
        if self._file is not None:
            results.save(self._file, _SCHEMA, facts)


def _children_at_work() -> bool:
    """Whether there are child processes for which Python waits at its end."""
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and any(not child.daemon for child in multiprocessing.active_children())
