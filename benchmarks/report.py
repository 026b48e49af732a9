"""Runs as Markdown and as tables on the terminal: ratios first, losses marked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from .results import Comparison, Figure, Run

__all__ = ["as_table", "digits", "markdown", "show", "suite_table"]

_TITLES = {
    "stream": "Streams: every call a new scene, every kernel map built anew",
    "layers": "One submanifold layer, 3x3x3, C -> C",
    "shells": "One submanifold layer on spherical shells",
    "networks": "Whole networks, every kernel map built anew",
    "backbones": "torchsparse's backbones, every kernel map built anew; SECOND is the yardstick",
    "memory": "Peak memory of whole networks",
    "cold": "First calls: nothing compiled, nothing tuned",
    "scale": "Scale: one layer against voxels and channels",
    "cpu": "Layers and whole networks on the CPU (one thread: CPU time)",
    "host": "Host time alone, per layer",
}
_UNITS = {"host": ("us", 1e3), "cold": ("s", 1e-3)}
_NO_MEMORY = ("host", "cold")
_LEGEND = """\
Ratios are time divided by {base}'s time: **below 1 is faster**. Each is the median over paired
rounds (the peers take turns, every other round in reverse order), with its quartiles; a slower
case is marked **slower** when the quartiles agree, *even* when they lie on both sides of 1. Times
include the host and end with the device idle. Floor: the share of the measured device limit that a
peer reaches (multiply-adds at the probed matrix rate or traffic at the probed bandwidth, whichever
takes longer), {base} first. Memory: peak of one call on top of its inputs and weights and, where
the record has it, what a peer holds between calls, as captured graphs do; divided by {base}'s."""

Table = tuple[list[str], list[list[str]]]


def markdown(runs: Sequence[Run], plots: Sequence[Path] = ()) -> str:
    """The report of one or several runs; `plots` are shown where they belong, by relative path."""
    parts = ["# Benchmark report"]
    for run in runs:
        parts += _facts(run)
    images = {path.stem: path for path in plots}
    for run in runs:
        many = len(run.peers) > 1
        if many:
            parts.append(_LEGEND.format(base=run.peers[0]))
        for suite in _suites(run):
            parts.append(f"## {_TITLES.get(suite, suite)}")
            if many:
                parts.append(_overview(run, suite))
            parts += [
                f"![{stem}]({path.as_posix()})" for stem, path in images.items() if stem.partition("-")[0] == suite
            ]
            parts.append(as_table(*suite_table(run, suite, bold=True)))
    return "\n\n".join(part for part in parts if part) + "\n"


def show(run: Run) -> None:
    """Print a run's tables: with rich on a terminal, else as Markdown."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:  # a bare GPU machine
        print(markdown([run]))
        return
    console = Console(emoji=False)
    if not console.is_terminal:  # a file or a pipe has no width
        print(markdown([run]))
        return
    for suite in _suites(run):
        header, rows = suite_table(run, suite)
        table = RichTable(*header, title=_TITLES.get(suite, suite), title_justify="left")
        for row in rows:
            lost = "slower" in row[-1]
            table.add_row(*row, style="yellow" if lost else None)
        console.print(table)
        if len(run.peers) > 1:
            console.print(_overview(run, suite).replace("**", ""), markup=False)
    for note in run.notes:
        console.print(note, style="yellow", markup=False)


def suite_table(run: Run, suite: str, bold: bool = False) -> Table:
    """Header and rows of one suite, losses marked in the last column.

    Columns: the case; per further peer its ratio, the quartiles and the ratio of memories; the
    share of the floor of every peer; the medians of every peer, with the quartiles where there is
    only one; of streams what nine calls of ten stay below, how long the GPU works, and wall time
    over that; remarks.
    """
    cases = [one for one in run.comparisons() if one.base.suite == suite]
    base, *others = run.peers
    unit, factor = _UNITS.get(suite, ("ms", 1.0))
    floors = any(figure.floor_share for one in cases for figure in _figures(one))
    timed = any(figure.ms is not None for one in cases for figure in _figures(one))
    memory = any(_memory(one, other) is not None for one in cases for other in one.others)
    header = ["case", "voxels", "dtype", "work"]
    for peer in others:
        header += [f"{peer} / {base}", "quartiles"] if timed else []
        if memory:
            header.append(f"memory {peer} / {base}" if len(others) > 1 else "memory")
    header += ["floor"] if floors else []
    names = " / ".join(run.peers)
    header.append(f"{names}, {unit}" if timed else f"{names}, MB")
    alone = timed and not others
    header += ["quartiles"] if alone else []
    yardsticks = {_scenes(one.base): one.base for one in cases if one.base.subject == "second"}
    measured = suite == "backbones" and timed
    header += [f"of {base}'s SECOND"] if measured else []
    streams = suite in ("stream", "backbones")
    header += ["nine of ten below", "GPU busy", "wall / GPU busy", ""] if streams else [""]
    rows = []
    for one in cases:
        figures = {figure.peer: figure for figure in _figures(one)}
        first = one.base
        voxels = next((str(f.rows) for f in figures.values() if f.rows), "-")
        row = [f"{first.subject}, {first.scene}", voxels, first.dtype, first.label]
        for peer in others:
            other = figures.get(peer)
            row += _ratio_cells(one, other, bold) if timed else []
            if memory:
                share = None if other is None else _memory(one, other)
                row.append("-" if share is None else f"{share:.2f}")
        if floors:
            shares = [figures[p].floor_share if p in figures else None for p in run.peers]
            row.append(" / ".join("-" if s is None else f"{s:.0%}" for s in shares))
        values = [_value(figures.get(peer), timed, factor) for peer in run.peers]
        row.append(" / ".join(values))
        row += [_spread(first, factor)] if alone else []
        peers = [figures.get(peer) for peer in run.peers]
        if measured:
            yard = yardsticks.get(_scenes(first))
            shares = [f.ms / yard.ms if f and f.ms and yard and yard.ms else None for f in peers]
            row.append(" / ".join(f"{share:.2f}" if share else "-" for share in shares))
        if streams:
            for times in ([f and f.p90 for f in peers], [f and f.busy_ms for f in peers]):
                row.append(" / ".join(digits(time) if time else "-" for time in times))
            shares = [f.ms / f.busy_ms if f and f.ms and f.busy_ms else None for f in peers]
            row.append(" / ".join(f"{share:.1f}" if share else "-" for share in shares))
        rows.append([*row, _remarks(one, bold)])
    return header, rows


def _scenes(figure: Figure) -> tuple[str, str, bool]:
    """What networks have to share for their times to be compared."""
    return figure.scene, figure.dtype, figure.work.startswith("stream")


def _figures(one: Comparison) -> list[Figure]:
    return [one.base, *one.others]


def _suites(run: Run) -> list[str]:
    return list(dict.fromkeys(figure.suite for figure in run.figures))


def _value(figure: Figure | None, timed: bool, factor: float) -> str:
    value = None if figure is None else figure.ms if timed else figure.memory_mb
    if value is None:
        return "-"
    return digits(value * factor if timed else value)


def _spread(figure: Figure, factor: float) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"{digits(figure.low * factor)} .. {digits(figure.high * factor)}"


def digits(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _memory(one: Comparison, other: Figure) -> float | None:
    """Ratio of memories where they are what the suite is about."""
    return None if one.base.suite in _NO_MEMORY else one.memory(other)


def _ratio_cells(one: Comparison, other: Figure | None, bold: bool) -> list[str]:
    ratio = None if other is None else one.ratio(other)
    if ratio is None:
        return ["-", ""]
    lost = bold and ratio.verdict == "slower"
    known = ratio.low != ratio.high
    return [
        f"**{ratio.median:.2f}**" if lost else f"{ratio.median:.2f}",
        f"{ratio.low:.2f} .. {ratio.high:.2f}" if known else "",
    ]


def _remarks(one: Comparison, bold: bool) -> str:
    """What went wrong, or that a peer lost or did not clearly win."""
    errors = {figure.peer: figure.error for figure in _figures(one) if figure.error}
    alike = len(errors) == 1 + len(one.others) and len(set(errors.values())) == 1
    words = [one.base.error or ""] if alike else [f"{p}: {text}" for p, text in errors.items()]
    for other in one.others:
        prefix = f"{other.peer} " if len(one.others) > 1 else ""
        ratio = one.ratio(other)
        if ratio is not None and ratio.verdict == "slower":
            words.append(prefix + ("**slower**" if bold else "slower"))
        elif ratio is not None and ratio.verdict == "even":
            words.append(prefix + ("*even*" if bold else "even"))
        memory = _memory(one, other)
        if memory is not None and memory > 1.005:
            words.append(prefix + ("**more memory**" if bold else "more memory"))
        if one.disagrees(other):
            words.append(f"results differ: {_result(one.base)}, {_result(other)}")
    return "; ".join(words).replace("|", "\\|").replace("\n", " ")


def _result(figure: Figure) -> str:
    check = figure.check or {}
    rms = check.get("rms")
    shown = "not finite" if rms is None else f"rms {rms:.4g}"
    return f"{figure.peer} {check.get('rows')} rows, {shown}"


def _overview(run: Run, suite: str) -> str:
    """Per further peer: how many cases it won and lost, and the geometric mean of its ratios."""
    lines = []
    cases = [one for one in run.comparisons() if one.base.suite == suite]
    for peer in run.peers[1:]:
        found = [(one, other) for one in cases for other in one.others if other.peer == peer]
        ratios = [one.ratio(other) for one, other in found]
        timed = [ratio for ratio in ratios if ratio is not None]
        memory = [value for one, other in found if (value := _memory(one, other))]
        text = f"{peer} against {run.peers[0]}: "
        if timed:
            count = {
                verdict: sum(ratio.verdict == verdict for ratio in timed) for verdict in ("faster", "even", "slower")
            }
            lost = f"**{count['slower']} slower**" if count["slower"] else "0 slower"
            text += f"{count['faster']} cases faster, {count['even']} even, {lost}; "
            text += f"geometric mean of the ratios {_mean(r.median for r in timed):.2f}"
        if memory:
            text += f"{', ' if timed else ''}memory {_mean(memory):.2f}"
        if timed or memory:
            lines.append(text + ".")
    return "\n".join(lines)


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _facts(run: Run) -> list[str]:
    """Machine, versions, rates, command and notes as a list."""
    lines = []
    if run.machine:
        lines.append("- machine: " + ", ".join(f"{k} {v}" for k, v in run.machine.items()))
    for peer, versions in run.versions.items():
        lines.append(f"- {peer}: " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    for dtype, rate in run.rates.items():
        lines.append(f"- probed in {dtype}: {rate['matrix'] / 1e12:.3g} TFLOP/s, {rate['copy'] / 1e12:.3g} TB/s")
    if run.command:
        lines.append(f"- command: `{run.command}`, {run.started}")
    lines += [f"- {note}" for note in run.notes]
    return ["\n".join(lines)] if lines else []


def as_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    text = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in text)
