"""Pictures of runs: ratios as bars around 1.0, shares of the floor, curves over size.

Drawn from records, so on any machine with matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .results import Comparison, Figure, Ratio, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_TITLES = {
    "layers": "One submanifold layer",
    "shells": "Spherical shells",
    "networks": "Networks",
    "memory": "Networks",
    "cold": "First calls",
    "scale": "Scale",
    "cpu": "On the CPU",
    "host": "Host time per layer",
}
_BAR_SUITES = ("layers", "shells", "networks", "cpu", "cold", "host")
_ROW_INCHES = 0.27
_LEAST, _MOST = 1 / 32, 32.0  # ratios beyond are drawn at the edge


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write every picture that the runs have figures for; returns the files.

    Names begin with the suite, so that a report can place them.
    """
    from .curves import draw_curves

    written: list[Path] = []
    for number, run in enumerate(runs):
        suffix = f"-{number + 1}" if len(runs) > 1 else ""
        for suite in dict.fromkeys(figure.suite for figure in run.figures):
            cases = [one for one in run.comparisons() if one.base.suite == suite]
            for peer in run.peers[1:]:
                written += _ratios(run, suite, peer, cases, folder, suffix)
            written += _floors(run, suite, cases, folder, suffix)
            if suite in ("scale", "layers"):
                written += draw_curves(run, suite, cases, folder, suffix)
    return written


Values = Callable[[Comparison, Figure], Ratio | None]


def _time_ratio(one: Comparison, other: Figure) -> Ratio | None:
    return one.ratio(other)


def _memory_ratio(one: Comparison, other: Figure) -> Ratio | None:
    value = one.memory(other)
    return None if value is None else Ratio(value, value, value)


def _ratios(run: Run, suite: str, peer: str, cases: list[Comparison], folder: Path, suffix: str) -> Iterator[Path]:
    """Bars of time, and of memory where networks or sizes are compared."""
    kinds: list[tuple[str, str, Values, tuple[str, str]]] = []
    if suite in _BAR_SUITES:
        kinds.append(("ratios", "time", _time_ratio, ("faster", "slower")))
    if suite in ("memory", "networks"):
        kinds.append(("memory", "peak and held memory", _memory_ratio, ("less", "more")))
    for stem, what, values, words in kinds:
        title = f"{_TITLES[suite]}: {what} of {peer} / {run.peers[0]}"
        found = [
            (one, value)
            for one in cases
            for other in one.others
            if other.peer == peer and (value := values(one, other)) is not None
        ]
        if found:
            several = f"-{peer}" if len(run.peers) > 2 else ""
            yield _bars(title, found, words, folder / f"{suite}-{stem}{several}{suffix}.png")


def _label(figure: Figure, dtypes: int) -> str:
    dtype = f"  {figure.dtype}" if dtypes > 1 else ""
    return f"{figure.subject}  {figure.scene}{dtype}"


def _panels(cases: Sequence[Comparison]) -> tuple[list[str], list[str]]:
    """The works, one panel each, and the rows that they share."""
    dtypes = len({one.base.dtype for one in cases})
    works = list(dict.fromkeys(one.base.label for one in cases))
    return works, list(dict.fromkeys(_label(one.base, dtypes) for one in cases))


def _bars(title: str, found: list[tuple[Comparison, Ratio]], words: tuple[str, str], path: Path) -> Path:
    """Horizontal bars from 1.0, a panel per work, whiskers from quartile to quartile.

    `words` name the two sides of 1.
    """
    from . import style

    cases = [one for one, _ in found]
    works, rows = _panels(cases)
    dtypes = len({one.base.dtype for one in cases})
    width = 3.2 + 0.045 * max(map(len, rows)) + 3.1 * len(works)
    height = 1.5 + _ROW_INCHES * len(rows)
    picture, panels = style.grid(1, len(works), width, height, title, sharey=True, sharex=True)
    low = min(0.5, *(max(ratio.low, _LEAST) for _, ratio in found)) / 1.35
    high = max(1.25, *(min(ratio.high, _MOST) for _, ratio in found)) * 1.35
    for axes, work in zip(panels[0], works, strict=True):
        for one, ratio in found:
            if one.base.label == work:
                _bar(axes, rows.index(_label(one.base, dtypes)), ratio)
        style.clean(axes, work, along="x")
        _ratio_axis(axes, low, high)
    first = panels[0][0]
    first.set_yticks(range(len(rows)), rows)
    first.set_ylim(len(rows) - 0.4, -0.6)
    colours = (style.FASTER, style.SLOWER)
    style.legend(picture, [(word, c, "s") for word, c in zip(words, colours, strict=True)])
    return style.save(picture, path)


def _bar(axes: Axes, row: int, ratio: Ratio) -> None:
    from . import style

    middle, low, high = (min(max(value, _LEAST), _MOST) for value in (ratio.median, ratio.low, ratio.high))
    colour = style.FASTER if ratio.median <= 1 else style.SLOWER
    axes.barh(row, middle - 1, left=1, height=0.66, color=colour, alpha=0.85, linewidth=0)
    axes.plot([low, high], [row, row], color="#1d2433", linewidth=1.1, solid_capstyle="butt")
    left = middle < 1
    axes.annotate(
        f"{ratio.median:.2f}",
        (min(low, middle) if left else max(high, middle), row),
        xytext=(-4 if left else 4, 0),
        textcoords="offset points",
        va="center",
        ha="right" if left else "left",
        fontsize=8,
        color="#1d2433",
    )


def _ratio_axis(axes: Axes, low: float, high: float) -> None:
    """Logarithmic, so that half and double are equally far from 1."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    fine = high / low < 8
    step = 0.5 if fine else 1.0
    first, last = math.ceil(math.log2(low) / step), math.floor(math.log2(high) / step)
    axes.xaxis.set_major_locator(FixedLocator([2 ** (k * step) for k in range(first, last + 1)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.axvline(1.0, color="#1d2433", linewidth=1.2, zorder=3)


def _floors(run: Run, suite: str, cases: list[Comparison], folder: Path, suffix: str) -> Iterator[Path]:
    """Dots of how much of the device limit each peer reaches."""
    if suite not in ("layers", "shells"):
        return
    found = [one for one in cases if any(f.floor_share for f in (one.base, *one.others))]
    if not found:
        return
    from . import style

    works, rows = _panels(found)
    dtypes = len({one.base.dtype for one in found})
    width = 3.2 + 0.045 * max(map(len, rows)) + 3.1 * len(works)
    title = f"{_TITLES[suite]}: share of the measured device limit"
    size = (width, 1.5 + _ROW_INCHES * len(rows))
    picture, panels = style.grid(1, len(works), *size, title, sharey=True, sharex=True)
    for axes, work in zip(panels[0], works, strict=True):
        for one in found:
            if one.base.label != work:
                continue
            row = rows.index(_label(one.base, dtypes))
            shares = {f.peer: f.floor_share for f in (one.base, *one.others) if f.floor_share}
            axes.plot([min(shares.values()), max(shares.values())], [row, row], color="#d9dde3")
            for peer, share in shares.items():
                axes.plot(share, row, "o", color=style.colour_of(peer), markersize=6)
        style.clean(axes, work, along="x")
        axes.set_xlim(0, 1)
        axes.set_xticks([0.0, 0.2, 0.4, 0.6, 0.8])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panels[0][0].set_yticks(range(len(rows)), rows)
    panels[0][0].set_ylim(len(rows) - 0.4, -0.6)
    drawn = {figure.peer for one in found for figure in (one.base, *one.others)}
    entries = [(peer, style.colour_of(peer), "o") for peer in run.peers if peer in drawn]
    style.legend(picture, entries)
    yield style.save(picture, folder / f"{suite}-floor{suffix}.png")
