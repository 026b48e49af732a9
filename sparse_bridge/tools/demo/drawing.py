"""The look that all pictures share: dark panels, metric axes, legends, colour bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKGROUND, _PANEL, INK, FAINT, GRID = "#0b0f17", "#05070c", "#e6edf3", "#8b98a9", "#222b38"

Extent = tuple[float, float, float, float]  # x low, x high, y low, y high in metres


def require_matplotlib(instead: str = "") -> None:
    """Raise before any work is done if a picture cannot be drawn; `instead` ends the advice."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SettingError(
            f'the picture needs matplotlib, which is not installed; run pip install "sparse-bridge[viz]"{instead}.'
        ) from error


def check_png(path: Path) -> None:
    """SettingError unless `path` names a `.png` file."""
    if path.suffix.lower() != ".png":
        raise SettingError(f"{path}: expected a file name that ends in .png.")


def new_figure(size: tuple[float, float], title: str) -> Figure:
    """A dark figure of `size` inches whose panels keep clear of each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, facecolor=BACKGROUND)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    figure.suptitle(title, color=INK, fontsize=20, fontweight="bold")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write `figure`; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=BACKGROUND)


def plain_panel(axes: Axes, title: str, xlabel: str = "", ylabel: str = "") -> None:
    """Title, colours and axis labels of a panel."""
    axes.set_title(title, color=INK, fontsize=16, pad=10)
    axes.set_facecolor(_PANEL)
    axes.set_xlabel(xlabel, color=FAINT, fontsize=13)
    axes.set_ylabel(ylabel, color=FAINT, fontsize=13)
    axes.tick_params(colors=FAINT, labelsize=11)
    for spine in axes.spines.values():
        spine.set_color(GRID)


def metric_panel(axes: Axes, title: str, extent: Extent) -> None:
    """A panel seen from above, equal scales, in metres."""
    plain_panel(axes, title, "x, m", "y, m")
    axes.set_xlim(extent[0], extent[1])
    axes.set_ylim(extent[2], extent[3])
    axes.set_aspect("equal")


def colour_bar(axes: Axes, image: Any, label: str) -> None:
    """A bar exactly as high as the panel."""
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.02, 0.0, 0.028, 1.0)))
    bar.set_label(label, color=FAINT, fontsize=13)
    bar.ax.tick_params(colors=FAINT, labelsize=11)
    bar.outline.set_edgecolor(GRID)  # type: ignore[operator]


def legend(where: Axes | Figure, looks: Mapping[str, Any], **options: Any) -> None:
    """Names beside a square of their colour or, where a look maps properties of a line, that line.

    Colours, properties and `options` (`loc`, `ncols`, ...) are matplotlib's.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], label=name, **look) if isinstance(look, Mapping) else Patch(color=look, label=name)
        for name, look in looks.items()
    ]
    style = {"facecolor": _PANEL, "edgecolor": GRID, "labelcolor": INK, "fontsize": 13}
    where.legend(handles=handles, **{**style, **options})
