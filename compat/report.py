"""What both reports share: how results are grouped and worded."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_bridge import __version__
from sparse_bridge.adapters import base

from .matrix import FRAMEWORKS, Model
from .replays import Audited
from .results import OUTCOMES, CellResult, CheckResult, Results, counts

__all__ = [
    "ABOUT",
    "COMMAND",
    "SYMBOLS",
    "TITLES",
    "Group",
    "described",
    "device_of",
    "groups",
    "listed",
    "older",
    "ordered",
    "remarks",
    "run_line",
    "runs",
    "shares",
    "tally",
]

TITLES = {framework.name: framework.title for framework in base.frameworks()}
LISTED = 29  # published models; the others are smoke tests
COMMAND = "python -m sparse_bridge compat --write"
ABOUT = {
    "import": "the model's file, which imports the framework as projects do, imports",
    "construct": "the network is built at its published widths",
    "forward": "one pass: outputs finite, every layer bridged",
    "backward": "every parameter of the network has a finite gradient",
    "step": "two steps of AdamW: loss and parameters finite",
    "autocast_fp16": "forward and backward under autocast to float16",
    "autocast_bf16": "the same to bfloat16",
    "eval": "inference without gradients, repeated in inference mode with equal result",
    "tiny": "2 to 50 voxels with an empty batch item, forward and backward in eval mode",
    "state_dict": "saved, loaded into another network, equal output",
    "copy": "deepcopy and pickle of the network, equal output",
    "ddp": "two gloo processes: gradients equal the average of the single ones",
    "native": "the real library from the same weights: outputs, gradients, three training steps",
    "reference": "where the real library cannot run: fp64, each layer one explicit matrix product",
}
SYMBOLS = {"pass": "✓", "fail": "✗", "known": "≈", "unsupported": "⊘", "not run": "·"}


@dataclasses.dataclass(frozen=True)
class Group:
    """The cells of a framework on a device, counted."""

    framework: str
    device: str
    models: int
    cells: Counter[str]
    checks: Counter[str]


def device_of(found: Results, cell: CellResult) -> str:
    """The name of the device that the cell ran on."""
    return str(found.runs[cell.run]["device"])


def ordered(found: Results) -> list[CellResult]:
    """Cells by framework, number, name, device, dtype and mode; smoke models (0) last."""
    return sorted(
        found.cells,
        key=lambda cell: (
            FRAMEWORKS.index(cell.framework),
            cell.number or 99,
            cell.model,
            device_of(found, cell),
            cell.dtype,
            cell.mode,
            cell.size,
        ),
    )


def groups(found: Results, models: Sequence[Model] = ()) -> list[Group]:
    """Counts per framework and device; models of the matrix without a cell there are not run."""
    table: dict[tuple[str, str], list[CellResult]] = {}
    for cell in ordered(found):
        table.setdefault((cell.framework, device_of(found, cell)), []).append(cell)
    result = []
    for (framework, device), cells in table.items():
        present = {cell.model for cell in cells}
        missing = sum(one.framework == framework and one.name not in present for one in models)
        checks = Counter(check.shown for cell in cells for check in cell.checks)
        outcomes = counts(cells) + Counter({"not run": missing})
        result.append(Group(framework, device, len(present), outcomes, checks))
    return result


def runs(found: Results) -> list[str]:
    """One line per device and set of versions, with the days on which it ran."""
    dates: dict[str, list[str]] = {}
    for run in found.runs:
        versions = ", ".join(f"{name} {one}" for name, one in run["versions"].items() if one)
        dates.setdefault(f"{run['device']}, {{}}: {versions}", []).append(run["date"])
    return [line.format(" to ".join(sorted({min(days), max(days)}))) for line, days in dates.items()]


def run_line(run: Mapping[str, Any]) -> str:
    """The day of a run, and its versions."""
    versions = ", ".join(f"{name} {one}" for name, one in run["versions"].items() if one)
    return f"{run['device']}, {run['date']}: {versions}"


def shares(models: Sequence[Audited], mode: str) -> str:
    """Of how many models all, some or no layers may be replayed in a mode."""
    counted = [(one.layers, sum(part.layers for part in one.replayed(mode))) for one in models if mode in one.modes]
    some = [layers - count for layers, count in counted if count]
    return (
        f"{len(some)} of {len(counted)} models, {some.count(0)} of them with all layers and "
        f"{len(some) - some.count(0)} in part"
    )


def older(found: Results) -> str:
    """A sentence that says so where cells are of other versions than this one; else empty."""
    versions = [found.runs[cell.run]["versions"]["sparse_bridge"] for cell in found.cells]
    counted = Counter(
        (device_of(found, cell), version)
        for cell, version in zip(found.cells, versions, strict=True)
        if version != __version__
    )
    parts = [f"{count} on {device} (version {version})" for (device, version), count in sorted(counted.items())]
    return f"Cells not run again with {__version__}: {', '.join(parts)}." if parts else ""


def listed(found: Results) -> list[str]:
    """Per device: how many of the listed models pass all that was run of them, on what scenes."""
    sentences = []
    for device in dict.fromkeys(device_of(found, cell) for cell in ordered(found)):
        cells = [one for one in found.cells if one.number and device_of(found, one) == device]
        run = {one.number for one in cells}
        imperfect = {one.number for one in cells if one.outcome != "pass"}
        sizes = Counter(one.size for one in found.cells if device_of(found, one) == device)
        scenes = ", ".join(f"{count} {size}" for size, count in sorted(sizes.items()))
        sentences.append(
            f"{device}: of the {LISTED} listed models {len(run)} have run, "
            f"{len(run - imperfect)} of them without any check failed or unsupported. "
            f"Cells by the size of their scenes: {scenes}."
        )
    return sentences


def tally(cells: Sequence[CellResult], check: str) -> tuple[int, int]:
    """Of one check: how often it passed, and how often it applied."""
    found = [one.outcome for cell in cells for one in cell.checks if one.check == check]
    return found.count("pass"), len(found) - found.count("not run")


def remarks(cell: CellResult) -> list[CheckResult]:
    """Checks that failed or are not supported."""
    return [check for check in cell.checks if check.outcome in ("fail", "unsupported")]


def described(numbers: Counter[str]) -> str:
    """Counts in words, without the zeros: "12 pass, 1 fail"."""
    return ", ".join(f"{numbers[one]} {one}" for one in OUTCOMES if numbers[one])
