"""Draws docs/figures/speed.png from the record of the README's table:
`python docs/figures/speed.py [FILE]`, in the root of the repository.

Letters are large enough for a phone: of 390 pixels it shows the picture in 358."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "h200_stream_default.json"
INK, FAINT = "#1c2430", "#4b5a6b"
COLOURS = ["#2a7f62", "#3f7cac", "#d49a2a", "#7b5ea7"]
WIDTH, SMALL, TEXT = 5.0, 11.5, 12.5  # inches, points: 11.4 and 12.4 pixels of such a phone


def table() -> tuple[list[str], list[tuple[str, list[float | None]]], str]:
    """Column titles and rows of the README's table: times as fast as spconv, None where there is
    no figure; and what the record is of."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.headline import headline
    from benchmarks.results import load_run

    run = load_run(RECORD)
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in headline(run).splitlines()]
    found = [(name, [None if cell == "-" else float(cell) for cell in cells]) for name, *cells in rows]
    gpu = " ".join(str(run.machine["gpu"]).split()[:2]).rstrip(",")
    return head[1:], found, f"{gpu}, fp16, {run.started[:10]}, {run.machine['commit']}"


def draw(path: Path) -> Figure:
    """One group of bars per stream below its name, one bar per API; the line at 1 is spconv."""
    peers, rows, record = table()
    bars = sum(value is not None for _, values in rows for value in values)
    picture = Figure(figsize=(WIDTH, 0.19 * bars + 0.38 * len(rows) + 1.1), facecolor="white")
    FigureCanvasAgg(picture)
    picture.set_layout_engine("constrained")
    axes = picture.subplots()
    y = 0.0
    for name, values in rows:
        axes.text(0, y + 0.3, name.removesuffix(", one scene at a time"), va="center", fontsize=TEXT, color=INK)
        y += 1.35
        top = y - 0.5
        for place, value in enumerate(values):
            if value is not None:
                axes.barh(y, value, 0.86, color=COLOURS[place])
                axes.text(value + 0.06, y, f"{value:.1f}", va="center", fontsize=SMALL, color=INK)
                y += 1
        axes.vlines(1, top, y - 0.5, color="#c8553d", lw=2)
        y += 0.4
    axes.set_ylim(y - 0.6, -0.2)
    axes.set_xlim(0, 1.1 * max(1, *(value for _, values in rows for value in values if value is not None)))
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=SMALL, colors=FAINT)
    axes.set_xlabel(f"times as fast as spconv 2.3.8 (red line)\n{record}", color=FAINT, fontsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [axes.barh(0, 0, color=COLOURS[place], label=peer) for place, peer in enumerate(peers)]
    picture.legend(handles=handles, frameon=False, fontsize=SMALL, loc="outside upper center", ncols=2)
    picture.savefig(path, dpi=140)
    return picture


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
