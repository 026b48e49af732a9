"""What a run of the matrix found, as data: the JSON files, how they merge, and their counts."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sparse_bridge.errors import SettingError
from sparse_bridge.tools.harness import results

from .matrix import CHECKS, FRAMEWORKS

__all__ = ["OUTCOMES", "WORST", "CellResult", "CheckResult", "Results", "merge", "run_facts"]

SCHEMA = 1
OUTCOMES = ("pass", "fail", "known", "unsupported", "not run")
WORST = ("fail", "known", "unsupported", "pass")  # the first of them decides


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Outcome of one check. reason: why not passed, or a remark; expected: listed as known."""

    check: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    expected: bool = False

    @property
    def shown(self) -> str:
        """The outcome in reports: a failure that the matrix lists with its reason is "known"."""
        return "known" if self.outcome == "fail" and self.expected else self.outcome


@dataclasses.dataclass(frozen=True)
class CellResult:
    """One model on one device. mode: how the framework was answered; run: index into `runs`."""

    number: int
    model: str
    framework: str
    device: str
    dtype: str
    mode: str
    size: str
    checks: tuple[CheckResult, ...]
    run: int = 0

    @property
    def outcome(self) -> str:
        """That of its worst check; checks that do not apply leave it alone."""
        found = {check.shown for check in self.checks}
        return next((one for one in WORST if one in found), "not run")

    @property
    def unexpected(self) -> list[CheckResult]:
        """Failures that the matrix does not list."""
        return [one for one in self.checks if one.outcome == "fail" and not one.expected]

    @property
    def place(self) -> tuple[str, ...]:
        """What the cell is about: a later run of the same replaces it."""
        return (self.framework, self.model, self.device, self.dtype, self.mode, self.size)


@dataclasses.dataclass(frozen=True)
class Results:
    """Cells with the runs that they come from; a run is a dict of machine, versions, date."""

    runs: tuple[dict[str, Any], ...]
    cells: tuple[CellResult, ...]

    def save(self, path: pathlib.Path) -> None:
        """Write as JSON."""
        results.save(path, SCHEMA, dataclasses.asdict(self))

    @staticmethod
    def read(path: pathlib.Path) -> Results:
        """Read what `save` wrote.

        Raises:
            SettingError: the file is not such a file.
        """
        try:
            schema, values = results.read(path)
            if schema != SCHEMA:
                raise ValueError(f"schema {schema}, expected {SCHEMA}")
            cells = []
            for cell in values["cells"]:
                checks = tuple(CheckResult(**check) for check in cell.pop("checks"))
                cells.append(CellResult(**cell, checks=checks))
            return Results(tuple(values["runs"]), tuple(cells))
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = getattr(error, "strerror", None) or error
            raise SettingError(f"{path} holds no results of `compat`: {why}") from None

    @property
    def unexpected(self) -> list[tuple[CellResult, CheckResult]]:
        """Failures that the matrix does not list."""
        return [(cell, check) for cell in self.cells for check in cell.unexpected]


def merge(parts: Iterable[Results]) -> Results:
    """Several files as one; of equal checks of cells about the same thing the last one stays.

    A cell's checks are of one version of sparse_bridge: those of another one are dropped.
    """
    runs: list[dict[str, Any]] = []
    cells: dict[tuple[str, ...], CellResult] = {}

    def version(run: int) -> str:
        return runs[run]["versions"]["sparse_bridge"]

    for part in parts:
        offset = len(runs)
        runs.extend(part.runs)
        for cell in part.cells:
            before = cells.pop(cell.place, None)
            kin = before is not None and version(before.run) == version(cell.run + offset)
            checks = {check.check: check for check in (before.checks if before and kin else ())}
            checks |= {check.check: check for check in cell.checks}
            kept = tuple(checks[name] for name in CHECKS if name in checks)
            cells[cell.place] = dataclasses.replace(cell, checks=kept, run=cell.run + offset)
    used = sorted({cell.run for cell in cells.values()})
    renumbered = {old: new for new, old in enumerate(used)}
    final = [dataclasses.replace(one, run=renumbered[one.run]) for one in cells.values()]
    return Results(tuple(runs[index] for index in used), tuple(final))


def counts(cells: Sequence[CellResult]) -> Counter[str]:
    """Cells by outcome."""
    return Counter(cell.outcome for cell in cells)


def run_facts(device: str) -> dict[str, Any]:
    """The machine, the versions and the date, for the report."""
    import torch

    import sparse_bridge
    from benchmarks.machine import commit
    from sparse_bridge.kernels.runtime import target

    from .bridged import installed

    triton = target.triton_version()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": name,
        "machine": platform.machine(),
        "system": platform.system(),
        "versions": {
            "sparse_bridge": sparse_bridge.__version__,
            "commit": commit() or None,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton and ".".join(map(str, triton)),
            **{f"real {one}": installed(one) for one in FRAMEWORKS},
        },
    }
