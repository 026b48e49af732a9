"""The report as one HTML file that needs nothing else: filterable, by mouse and by keyboard."""

from __future__ import annotations

import html
import pathlib
import string
from collections.abc import Sequence

from . import projects, report
from .matrix import CHECKS, Model
from .results import OUTCOMES, CellResult, CheckResult, Results

__all__ = ["render"]

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")


def render(found: Results, models: Sequence[Model]) -> str:
    """`docs/compatibility.html` for these results; `models`: all of the matrix."""
    cells = report.ordered(found)
    return string.Template(_TEMPLATE.read_text()).substitute(
        command=_text(report.COMMAND),
        older=_text(report.older(found)),
        runs="".join(f"<li>{_text(line)}</li>" for line in report.runs(found)),
        outcome_heads="".join(f'<th scope="col" class="number">{one}</th>' for one in OUTCOMES),
        summary="\n".join(_summary(group) for group in report.groups(found, models)),
        listed="<br>".join(map(_text, report.listed(found))),
        selects="\n".join(_selects(found, cells)),
        total=len(cells),
        check_heads="".join(f'<th scope="col" class="check"><span>{name}</span></th>' for name in CHECKS),
        rows="\n".join(_row(found, cell) for cell in cells),
        about="\n".join(_about(found)),
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _summary(group: report.Group) -> str:
    numbers = "".join(f'<td class="number">{group.cells[one]}</td>' for one in OUTCOMES)
    parts = "".join(
        f'<span class="{one}" style="flex:{group.cells[one]}"></span>' for one in OUTCOMES[:-1] if group.cells[one]
    )
    rest = group.cells["not run"]
    label = report.described(group.cells)
    bar = f'<div class="bar" role="img" aria-label="{label}">{parts}'
    bar += f'<span style="flex:{rest}"></span></div>' if rest else "</div>"
    return (
        f'<tr><th scope="row">{report.TITLES[group.framework]}</th><td>{_text(group.device)}</td>'
        f'<td class="number">{group.models}</td>{numbers}<td>{bar}</td>'
        f"<td>{report.described(group.checks)}</td></tr>"
    )


def _selects(found: Results, cells: Sequence[CellResult]) -> list[str]:
    """One filter per property; its id is the name of the rows' data attribute."""
    values = {
        "framework": [cell.framework for cell in cells],
        "device": [report.device_of(found, cell) for cell in cells],
        "dtype": [cell.dtype for cell in cells],
        "mode": [cell.mode for cell in cells],
        "size": [cell.size for cell in cells],
        "outcome": [cell.outcome for cell in cells],
    }
    fields = []
    for name, every in values.items():
        options = "".join(
            f'<option value="{_text(one)}">{_text(report.TITLES.get(one, one))}</option>'
            for one in dict.fromkeys(every)
        )
        choice = f'<select id="{name}"><option value="">all</option>{options}</select>'
        fields.append(f"<label>{name} {choice}</label>")
    return fields


def _row(found: Results, cell: CellResult) -> str:
    device = report.device_of(found, cell)
    by_name = {check.check: check for check in cell.checks}
    data = {
        "framework": cell.framework,
        "device": device,
        "dtype": cell.dtype,
        "mode": cell.mode,
        "size": cell.size,
        "outcome": cell.outcome,
    }
    attributes = " ".join(f'data-{name}="{_text(value)}"' for name, value in data.items())
    where = f"{device}, {cell.dtype}, {cell.mode}, {cell.size}"
    return (
        f'<tr {attributes}><td class="number">{cell.number or ""}</td>'
        f'<th scope="row">{_model(cell.model)}</th><td>{report.TITLES[cell.framework]}</td>'
        f'<td class="where">{_text(where)}</td>'
        f'<td class="outcome"><span class="tag {_class(cell.outcome)}">{cell.outcome}</span></td>'
        f"{''.join(_mark(by_name.get(name)) for name in CHECKS)}<td>{_details(cell)}</td></tr>"
    )


def _model(name: str) -> str:
    """The model, as a link to its project."""
    address = projects.address(name)
    return f'<a href="{_text(address)}">{_text(name)}</a>' if address else _text(name)


def _mark(check: CheckResult | None) -> str:
    outcome = check.shown if check else "not run"
    hint = f"{check.check}: {outcome}; {check.reason}" if check else outcome
    return (
        f'<td class="check {_class(outcome)}" title="{_text(hint)}">'
        f'<span aria-label="{outcome}">{report.SYMBOLS[outcome]}</span></td>'
    )


def _details(cell: CellResult) -> str:
    bad = report.remarks(cell)
    lines = "".join(
        f'<li><span class="{_class(one.shown)}">{one.check}: {one.shown}</span>'
        f"{' (listed)' if one.expected else ''} {_text(one.reason)} "
        f'<span class="soft">{one.seconds:g} s</span></li>'
        for one in [*bad, *(check for check in cell.checks if check not in bad)]
    )
    title = f"{len(bad)} not passed" if bad else "all checks"
    return f"<details><summary>{title}</summary><ul>{lines}</ul></details>"


def _class(outcome: str) -> str:
    return outcome.replace(" ", "-")


def _about(found: Results) -> list[str]:
    rows = []
    for name, text in report.ABOUT.items():
        passed, applied = report.tally(found.cells, name)
        rows.append(
            f'<tr><th scope="row"><code>{name}</code></th><td>{_text(text)}</td>'
            f'<td class="number">{passed} of {applied}</td></tr>'
        )
    return rows
