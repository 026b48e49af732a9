"""The report as Markdown: counts, one row per model, footnotes with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from . import report
from .matrix import FRAMEWORKS, Model
from .results import OUTCOMES, CellResult, Results

__all__ = ["render"]


def render(found: Results, models: Sequence[Model]) -> str:
    """`docs/compatibility.md` for these results; `models`: all of the matrix."""
    notes = _Notes()
    body = [part for name in FRAMEWORKS for part in _framework(found, models, name, notes)]
    made = [f"- {line}" for line in report.runs(found)]
    summary = [*made, "", *_summary(found, models)]
    parts = [*_head(), *summary, *body, *_checks(found), *notes.lines()]
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
            lines.append(f'{number}. <a id="note-{number}"></a>{_plain(reason)}')
        return lines


def _head() -> list[str]:
    return [
        "# Compatibility",
        "",
        "Networks of public projects, written as their projects write them, under "
        "`sparse_bridge.enable()`. This page and its [filterable form](compatibility.html) are "
        "made by a program:",
        "",
        "```bash",
        report.COMMAND,
        "```",
        "",
        "runs each model in a fresh process (`compat/models`, `compat/matrix`). A cell counts as "
        "**pass** when all of its checks that apply here pass, as **fail** when one fails, as "
        "**known** when one fails that `compat/matrix` lists with its reason, such as behaviour "
        "equal to the original's own, and as **unsupported** when one asks for something that is "
        "refused on purpose. A number marks a note with the reason. A check that passes although "
        "it is listed counts as a failure.",
        "",
    ]


def _summary(found: Results, models: Sequence[Model]) -> list[str]:
    rows = [
        (
            report.TITLES[group.framework],
            group.device,
            str(group.models),
            *(str(group.cells[one]) for one in OUTCOMES),
            report.described(group.checks),
        )
        for group in report.groups(found, models)
    ]
    names = ("framework", "device", "models", *(f"cells: {one}" for one in OUTCOMES), "checks")
    lines = [f"- {sentence}" for sentence in report.listed(found)]
    return [*_table(names, rows), "", *lines, ""]


def _framework(found: Results, models: Sequence[Model], framework: str, notes: _Notes) -> list[str]:
    cells = [cell for cell in report.ordered(found) if cell.framework == framework]
    names = [(cell.number, cell.model) for cell in cells]
    names += [(one.number, one.name) for one in models if one.framework == framework]
    if not names:
        return []
    places = sorted({_place(found, cell) for cell in cells})
    by_place = {(cell.model, _place(found, cell)): cell for cell in cells}
    rows = [
        (
            str(number or "smoke"),
            _plain(name),
            *(_cell(by_place.get((name, place)), notes) for place in places),
        )
        for number, name in sorted(set(names), key=lambda one: (one[0] or 99, one[1]))
    ]
    title = [f"## {report.TITLES[framework]}", ""]
    return [*title, *_table(("no.", "model", *places), rows), ""]


def _place(found: Results, cell: CellResult) -> str:
    return f"{report.device_of(found, cell)}, {cell.size}, {cell.dtype}, {cell.mode}"


def _cell(cell: CellResult | None, notes: _Notes) -> str:
    if cell is None:
        return "not run"
    numbers = Counter(check.shown for check in cell.checks)
    applies = sum(numbers.values()) - numbers["not run"]
    marks = "".join(
        notes.mark(f"{one.check}{' (listed)' if one.expected else ''}: {one.reason}")
        for one in report.remarks(cell)
    )
    outcome = f"**{cell.outcome}**" if cell.outcome == "fail" else cell.outcome
    return f"{outcome} {numbers['pass']}/{applies}{marks}"


def _checks(found: Results) -> list[str]:
    rows = []
    for name, text in report.ABOUT.items():
        passed, applied = report.tally(found.cells, name)
        rows.append((f"`{name}`", _plain(text), f"{passed} of {applied}"))
    return ["## What is checked", "", *_table(("check", "what", "passed"), rows)]


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _plain(text: str) -> str:
    """Text that Markdown leaves alone inside a table."""
    for mark in ("\\", "|", "*", "_", "`", "<", "[", "]"):
        text = text.replace(mark, "&lt;" if mark == "<" else "\\" + mark)
    return text
