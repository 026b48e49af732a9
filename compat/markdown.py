"""The report as Markdown: counts, one row per model, footnotes with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sparse_bridge import policy

from . import report
from .matrix import FRAMEWORKS, Model
from .replays import MODES, Audited, ReplayAudit
from .results import WORST, CellResult, Results

__all__ = ["plain", "render"]


def render(
    found: Results, models: Sequence[Model], replays: ReplayAudit | None = None, on_gpus: Sequence[ReplayAudit] = ()
) -> str:
    """`docs/compatibility.md` for these results; `models`: all of the matrix; replays: what may be replayed; on_gpus:
    what was."""
    notes = _Notes()
    body = [part for name in FRAMEWORKS for part in _framework(found, models, name, notes)]
    made = [f"- {line}" for line in report.runs(found)]
    summary = [*made, "", *_summary(found, models)]
    replayed = [] if replays is None else _replays(replays, on_gpus, models, notes)
    parts = [*_head(), *summary, *body, *replayed, *_checks(found), *notes.lines()]
    return "\n".join(parts) + "\n"


class _Notes:
    """Footnotes: equal reasons share a number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        number = self._numbers.setdefault(reason, len(self._numbers) + 1)
        return f"<sup>[{number}](#note-{number})</sup>"

    def lines(self) -> list[str]:
        if not self._numbers:
            return []
        lines = ["", "## Notes", ""]
        for reason, number in self._numbers.items():
            lines.append(f'{number}. <a id="note-{number}"></a>{plain(reason)}')
        return lines


def _head() -> list[str]:
    return [
        "# Compatibility",
        "",
        "For those with a published model: whether it runs here, on which device, and what was checked of it.",
        "",
        "[Filter the matrix](compatibility.html)",
        "",
        "Networks of public projects, written as their projects write them, run under "
        "`sparse_bridge.enable()`. This page and the filter over every cell and check are made "
        "by a program:",
        "",
        "```bash",
        report.COMMAND,
        "```",
        "",
        "It runs each model in a fresh process (`compat/models`, `compat/matrix`), once per "
        "device, dtype, mode and size: a cell. A cell counts as **pass** when all of its checks "
        "that apply here pass, as **fail** when one fails, as **known** when one fails that "
        "`compat/matrix` lists with its reason, such as behaviour equal to the original's own, "
        "and as **unsupported** when one asks for something that is refused on purpose. A check "
        "that passes although it is listed counts as a failure.",
        "",
    ]


def _summary(found: Results, models: Sequence[Model]) -> list[str]:
    rows = [
        (report.TITLES[group.framework], group.device, report.described(group.cells), report.described(group.checks))
        for group in report.groups(found, models)
    ]
    older = report.older(found)
    lines = [f"- {sentence}" for sentence in report.listed(found)]
    table = _table(("framework", "device", "cells", "checks"), rows)
    return [*([f"**{older}**", ""] if older else []), *table, "", *lines, ""]


def _framework(found: Results, models: Sequence[Model], framework: str, notes: _Notes) -> list[str]:
    cells = [cell for cell in report.ordered(found) if cell.framework == framework]
    names = [(cell.number, cell.model) for cell in cells]
    names += [(one.number, one.name) for one in models if one.framework == framework]
    if not names:
        return []
    devices = list(dict.fromkeys(report.device_of(found, cell) for cell in report.ordered(found)))
    by_model: dict[tuple[str, str], list[CellResult]] = {}
    for cell in cells:
        by_model.setdefault((cell.model, report.device_of(found, cell)), []).append(cell)
    rows = [
        (
            plain(name),
            str(number or "smoke"),
            *(_outcome(by_model.get((name, device), []), notes) for device in devices),
        )
        for number, name in sorted(set(names), key=lambda one: (one[0] or 99, one[1]))
    ]
    title = [f"## {report.TITLES[framework]}", ""]
    return [*title, *_table(("model", "no.", *devices), rows), ""]


def _outcome(cells: Sequence[CellResult], notes: _Notes) -> str:
    """The worst cell of a model on a device, and how many of its checks passed there."""
    if not cells:
        return "not run"
    numbers = Counter(check.shown for cell in cells for check in cell.checks)
    applies = sum(numbers.values()) - numbers["not run"]
    reasons = dict.fromkeys(
        f"{one.check}{' (listed)' if one.expected else ''}: {one.reason}"
        for cell in cells
        for one in report.remarks(cell)
    )
    outcomes = {cell.outcome for cell in cells}
    worst = next(one for one in (*WORST, "not run") if one in outcomes)
    shown = f"**{worst}**" if worst == "fail" else worst
    return f"{shown} {numbers['pass']}/{applies}{''.join(map(notes.mark, reasons))}"


def _replays(replays: ReplayAudit, on_gpus: Sequence[ReplayAudit], models: Sequence[Model], notes: _Notes) -> list[str]:
    """Which modules of each model are replayed, by mode, and why the others are not: on the last GPU, else as far as a
    CPU can tell."""
    audited = {one.model: one for one in replays.models}
    seen = {one.model: one for gpu in on_gpus for one in gpu.models}
    rows = []
    for model in models:
        one = seen.get(model.name) or audited.get(model.name)
        cells = [_replayed(one, mode, notes) if one else "not run" for mode in MODES]
        if one and seen and model.name not in seen:
            cells = [f"on a CPU: {cell}" for cell in cells]
        rows.append((plain(model.name), report.TITLES[model.framework], str(one.layers) if one else "", *cells))
    about = [*_about_replays(replays), *(_on_gpus(on_gpus, list(seen.values())) if seen else [])]
    return [*about, *_table(("model", "framework", "layers", *MODES), rows), ""]


def _about_replays(replays: ReplayAudit) -> list[str]:
    return [
        "## Replays",
        "",
        "An NVIDIA GPU [replays](replays.md) the largest modules of "
        f"{policy.LEAST_LAYERS} layers or more whose Python leaves nothing behind and whose inputs a graph can "
        "distinguish, if a trial over a padded input shows nothing else. The table names the modules. "
        "Numbers are layers with weights, in the whole model and in those modules. Dropout is off here; with dropout, "
        "training stays eager.",
        "",
        f"**Audited on a CPU**, without the trial, over the smallest scenes. {report.run_line(replays.run)}. Made by "
        "`python -m compat.replays`.",
        "",
        *(f"- {mode}: {report.shares(replays.models, mode)}" for mode in MODES),
        "",
    ]


def _on_gpus(runs: Sequence[ReplayAudit], last: Sequence[Audited]) -> list[str]:
    """How the models were run on GPUs, and how many were replayed. last: the last run of each."""
    sizes = Counter(one.size for one in last)
    scenes = ", ".join(f"{count} over {size} scenes" for size, count in sorted(sizes.items()))
    return [
        f"**Run on a GPU** with default settings: {len(last)} models, {scenes} (small: about 2,400 voxels), every "
        "second replay compared with the layers. Made by `python -m compat.replays --device cuda`. The table is of the "
        "last run of each model.",
        "",
        *(f"- {mode}: {report.shares(last, mode)}" for mode in MODES),
        *(f"- {len(one.models)} models on {report.run_line(one.run)}" for one in runs),
        "",
    ]


def _replayed(one: Audited, mode: str, notes: _Notes) -> str:
    """How much of a model is replayed, and the reasons of the modules that are not."""
    if mode not in one.modes:
        return "does not train"
    parts = one.replayed(mode)
    count = sum(part.layers for part in parts)
    paths = ", ".join(f"`{part.path}`" for part in parts if part.path)
    shown = f"all{': ' * bool(paths)}{paths}" if count == one.layers else f"{count} of {one.layers}: {paths}"
    tried = one.modes[mode]
    reasons = dict.fromkeys(part.why for part in tried if part.why)
    if not tried:
        reasons = {f"no module with {policy.LEAST_LAYERS} layers of the framework takes or makes a sparse tensor": None}
    return (shown if parts else "none") + "".join(map(notes.mark, reasons))


def _checks(found: Results) -> list[str]:
    rows = []
    for name, text in report.ABOUT.items():
        passed, applied = report.tally(found.cells, name)
        rows.append((f"`{name}`", plain(text), f"{passed} of {applied}"))
    return ["## What is checked", "", *_table(("check", "what", "passed"), rows)]


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def plain(text: str) -> str:
    """Text that Markdown leaves alone inside a table."""
    for mark in ("\\", "|", "*", "_", "`", "<", "[", "]"):
        text = text.replace(mark, "&lt;" if mark == "<" else "\\" + mark)
    return text
