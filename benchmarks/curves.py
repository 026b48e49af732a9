"""Curves on logarithmic axes: time and memory against voxels and against channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import style
from .results import Comparison, Figure, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_curves"]

Measure = Callable[[Figure], float | None]
_TIME: tuple[str, Measure] = ("time, ms", lambda figure: figure.ms)
_MEMORY: tuple[str, Measure] = ("memory, peak and held, MB", lambda figure: figure.memory_mb)


def draw_curves(run: Run, suite: str, cases: Sequence[Comparison], folder: Path, suffix: str = "") -> Iterator[Path]:
    """For every dtype: over channels per scene, and for `scale` also over voxels per width."""
    figures = [figure for one in cases for figure in (one.base, *one.others) if figure.channels]
    for dtype in dict.fromkeys(figure.dtype for figure in figures):
        chosen = [figure for figure in figures if figure.dtype == dtype]
        end = f"{dtype}{suffix}.png"
        if suite == "scale":
            path = folder / f"{suite}-voxels-{end}"
            yield from _over_voxels(run, chosen, path, dtype)
        yield from _over_channels(run, suite, chosen, folder / f"{suite}-channels-{end}", dtype)


def _over_voxels(run: Run, figures: list[Figure], path: Path, dtype: str) -> Iterator[Path]:
    """The width with the most sizes: time above, memory below, a column per work."""
    widths = {figure.channels for figure in figures}
    sizes = {c: len({f.rows for f in figures if f.channels == c and f.rows}) for c in widths}
    width = max(sizes, key=lambda c: sizes[c], default=0)
    chosen = [figure for figure in figures if figure.channels == width]
    if sizes.get(width, 0) > 1:
        title = f"One submanifold layer, {width} channels, {dtype}, against voxels"
        yield _panels(run, chosen, title, "voxels", lambda figure: figure.rows, path)


def _over_channels(run: Run, suite: str, figures: list[Figure], path: Path, dtype: str) -> Iterator[Path]:
    """The first scene with several widths."""
    for scene in dict.fromkeys(figure.scene for figure in figures):
        chosen = [figure for figure in figures if figure.scene == scene]
        rows = max(figure.rows for figure in chosen)
        works = {figure.work for figure in chosen}
        widths = {work: {f.channels for f in chosen if f.work == work} for work in works}
        chosen = [figure for figure in chosen if len(widths[figure.work]) > 2]
        if chosen:
            title = f"One submanifold layer, {rows:,} voxels of {scene}, {dtype}, against channels"
            yield _panels(run, chosen, title, "channels", lambda f: f.channels, path)
            return


def _panels(
    run: Run, figures: list[Figure], title: str, label: str, place: Callable[[Figure], float], path: Path
) -> Path:
    works = list(dict.fromkeys(figure.label for figure in figures))
    size = (2.2 + 3.5 * len(works), 7.0)
    picture, panels = style.grid(2, len(works), *size, title, sharex=True, sharey="row")
    for row, (unit, value) in zip(panels, (_TIME, _MEMORY), strict=True):
        for axes, work in zip(row, works, strict=True):
            chosen = [figure for figure in figures if figure.label == work]
            for peer in run.peers:
                mine = [figure for figure in chosen if figure.peer == peer]
                _line(axes, mine, place, value, style.colour_of(peer))
            if value is _TIME[1]:
                _floor(axes, chosen, place)
            style.clean(axes, work if row is panels[0] else "")
            _log_axes(axes, label)
        row[0].set_ylabel(unit, fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel(label, fontsize=10)
    drawn = {figure.peer for figure in figures}
    entries = [(peer, style.colour_of(peer), "-") for peer in run.peers if peer in drawn]
    if any(figure.floor_ms for figure in figures):
        entries.append(("floor", style.FLOOR, ":"))
    style.legend(picture, entries)
    return style.save(picture, path)


def _line(axes: Axes, figures: list[Figure], place: Callable[[Figure], float], value: Measure, colour: str) -> None:
    """A peer's curve; a cross on the axis's lower edge where it gave no figure."""
    points = sorted((place(f), found) for f in figures if (found := value(f)) and place(f))
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1.8, markersize=4)
    failed = [x for f in figures if _failed(f) and (x := place(f))]
    if failed:
        axes.plot(failed, [0.03] * len(failed), "x", color=colour, markersize=7, transform=axes.get_xaxis_transform())


def _failed(figure: Figure) -> bool:
    return figure.error is not None and not figure.error.startswith("skipped")


def _floor(axes: Axes, figures: list[Figure], place: Callable[[Figure], float]) -> None:
    points = sorted({(place(f), f.floor_ms) for f in figures if f.floor_ms and place(f)})
    if points:
        axes.plot(*zip(*points, strict=True), ":", color=style.FLOOR, linewidth=1.6)


def _log_axes(axes: Axes, label: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2 if label == "channels" else 10)
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(2 if label == "channels" else 10, numticks=12))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high < 50 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _short(value: float) -> str:
    """1k, 8M."""
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= unit and value != 1024:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"
