"""Calls of layers in child processes, for the report of the program that started them.

Each child writes a file with a line for every (framework, layer, reason), whose count is
overwritten in place: what a child has counted outlives it, however it ends.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import time
from collections import Counter
from pathlib import Path

from ...log import logger
from .. import call_stats
from ..call_stats import Call, Report, Tally

_DIGITS = 20
_folder: str = ""  # of this program's report; "": there is none


class _KeptTally(dict[Call, int]):
    """A tally whose additions are also in a file, made with the first one."""

    def __init__(self, earlier: Tally, folder: str) -> None:
        super().__init__(earlier)
        self._folder = folder
        self._file: io.RawIOBase | None = None
        self._lines: dict[Call, int] = {}  # where each begins
        self._added: Counter[Call] = Counter()

    def __setitem__(self, key: Call, count: int) -> None:
        self._added[key] += count - self.get(key, 0)
        super().__setitem__(key, count)
        if self._folder:
            try:
                self._write(key)
            except OSError as error:  # a full disk, or the program has ended before
                logger.warning("calls of layers are missing in the program's report: %s", error)
                self._folder = ""

    def _write(self, key: Call) -> None:
        if self._file is None:
            name = f"{os.getpid()}-{time.time_ns()}"
            self._file = open(os.path.join(self._folder, name), "xb", buffering=0)  # noqa: SIM115
        count = f"{self._added[key]:0{_DIGITS}d}"
        if key in self._lines:
            self._file.seek(self._lines[key])
            self._file.write(count.encode())
        else:
            self._lines[key] = self._file.seek(0, os.SEEK_END)
            self._file.write(f"{count} {json.dumps(key)}\n".encode())


def keep(folder: str) -> None:
    """This process is a child: write what its layers count to `folder`; "": nowhere."""
    if folder:
        call_stats.count_in(_KeptTally(call_stats.snapshot(), folder))


def expect(folder: str) -> None:
    """Have children that are forked from now on write what their layers count to `folder`; "":
    not any more."""
    global _folder
    _folder = folder


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: keep(_folder))


def added_to(report: Report, folder: str) -> Report:
    """A report with what child processes have written to `folder`."""
    tally: Counter[Call] = Counter()
    for framework, layers in report.layers.items():
        for layer, count in layers.items():
            tally[framework, layer, None] += count.bridged
            for reason, n in count.original.items():
                tally[framework, layer, reason] += n
    files = sorted(Path(folder).iterdir())
    for file in files:
        for line in file.read_text().splitlines():
            framework, layer, reason = json.loads(line[_DIGITS + 1 :])
            tally[framework, layer, reason] += int(line[:_DIGITS])
    counted = {key: n for key, n in tally.items() if n}
    all_layers = call_stats.counts(counted)
    frameworks = tuple(
        dataclasses.replace(status, imported=status.imported or status.framework in all_layers)
        for status in report.frameworks
    )
    return dataclasses.replace(report, frameworks=frameworks, layers=all_layers, children=len(files))
