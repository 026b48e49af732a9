"""Draws docs/figures/speed.png from the record of the README's table:
`python docs/figures/speed.py [FILE]`, in the root of the repository."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
INK, FAINT = "#1c2430", "#5c6b7d"
COLOURS = ["#2a7f62", "#3f7cac", "#d49a2a", "#7b5ea7"]


def table() -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Column titles and rows of the README's table: times as fast as spconv, None where there is
    no figure."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.report import headline
    from benchmarks.results import load_run

    text = headline(load_run(ROOT / "benchmarks" / "results" / "h100_stream.json"))
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return head[1:], [(name, [None if cell == "-" else float(cell) for cell in cells]) for name, *cells in rows]


def draw(path: Path) -> None:
    """One group of bars per stream, one bar per API; the line at 1 is spconv."""
    peers, rows = table()
    picture = Figure(figsize=(8.6, 4.6), facecolor="white")
    FigureCanvasAgg(picture)
    picture.set_layout_engine("constrained")
    axes = picture.subplots()
    height = 0.8 / len(peers)
    for row, (_, values) in enumerate(rows):
        for place, value in enumerate(values):
            if value is None:
                continue
            y = row + (place - (len(peers) - 1) / 2) * height
            axes.barh(y, value, height * 0.9, color=COLOURS[place])
            axes.text(value + 0.04, y, f"{value:.1f}", va="center", fontsize=8, color=FAINT)
    axes.axvline(1, color="#c8553d", lw=1.4)
    axes.text(1.05, -0.62, "spconv 2.3.8", color="#c8553d", fontsize=9)
    names = [re.sub(r"^(.*?, .*?), ", r"\1,\n", name) for name, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9, color=INK)
    axes.set_ylim(len(rows) - 0.45, -0.8)
    most = max(value for _, values in rows for value in values if value is not None)
    axes.set_xlim(0, 1.08 * max(most, 1))
    axes.set_xlabel("times as fast as spconv 2.3.8 (NVIDIA H100, fp16)", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    bars = [axes.barh(0, 0, color=COLOURS[place], label=peer) for place, peer in enumerate(peers)]
    picture.legend(
        handles=bars, frameon=False, fontsize=9, loc="outside lower center", ncols=len(peers), title="through"
    )
    picture.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
