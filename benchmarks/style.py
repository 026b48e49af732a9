"""Colours, axes and files that the pictures have in common. Imports matplotlib: on demand only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

__all__ = ["FASTER", "FLOOR", "SLOWER", "clean", "colour_of", "grid", "legend", "save"]

FASTER, SLOWER, FLOOR = "#2a7f62", "#c8553d", "#8a8f98"
_INK, _FAINT = "#1d2433", "#d9dde3"
_PEER_COLOURS = {
    "spconv": "#c8553d",
    "bridge": "#2a7f62",
    "bridge_patch": "#58a4b0",
    "spconv_triton": "#7b5ea7",
    "torchsparse": "#d49a2a",
    "bridge_torchsparse": "#3f7cac",
    "flexgemm": "#5c6b73",
}


def colour_of(peer: str) -> str:
    return _PEER_COLOURS.get(peer, _INK)


def grid(
    rows: int, columns: int, width: float, height: float, title: str, **axes: Any
) -> tuple[Picture, list[list[Axes]]]:
    """A picture of rows x columns panels, inches wide and high, without a display."""
    picture = Picture(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(picture)
    picture.set_layout_engine("constrained", h_pad=0.06, w_pad=0.06)
    panels = picture.subplots(rows, columns, squeeze=False, **axes)
    picture.suptitle(title, color=_INK, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return picture, panels.tolist()


def clean(axes: Axes, title: str = "", along: str = "both") -> None:
    """Faint grid below the data across the axes `along` ("x", "y" or "both"), no box."""
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.set_axisbelow(True)
    axes.grid(True, which="major", axis=along, color=_FAINT, linewidth=0.7)
    axes.tick_params(colors=_INK, labelsize=9, length=0, which="both")
    for spine in axes.spines.values():
        spine.set_visible(False)


def legend(picture: Picture, entries: Sequence[tuple[str, str, str]]) -> None:
    """Below the panels on the right: (label, colour, line or marker style) each."""
    handles = []
    for label, colour, kind in entries:
        line = kind in ("-", ":", "--")
        marker = "o" if kind == "-" else "" if line else kind
        drawn = kind if line else "none"
        handles.append(Line2D([], [], color=colour, label=label, linestyle=drawn, marker=marker, markersize=5))
    picture.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=10)


def save(picture: Picture, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=130, facecolor="white")
    return path
