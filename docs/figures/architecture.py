"""Draws docs/figures/architecture.png: `python docs/figures/architecture.py [FILE]`."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, FAINT = "#1c2430", "#5c6b7d"
BANDS = [  # name of the folder, colour, height of the middle; from top to bottom
    ("your code", "#e8ecf2", 9.2),
    ("adapters/", "#dbe9f6", 7.4),
    ("core/", "#dff0e2", 4.75),
    ("kernels/", "#fbe9d3", 2.1),
    ("device", "#e8ecf2", 0.5),
]
HEIGHT = {"your code": 1.0, "adapters/": 1.5, "core/": 2.9, "kernels/": 1.5, "device": 0.9}
LEFT, RIGHT = 1.9, 16.0


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str = ""):
    """A white box around (x, y), a bold title and smaller lines below it."""
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, fc="white", ec=FAINT, lw=1.1))
    lines = text.count("\n") + 1 if text else 0
    axes.text(x, y + 0.15 * lines, title, ha="center", va="center", weight="bold", color=INK)
    if text:
        axes.text(x, y - 0.2, text, ha="center", va="center", fontsize=8.6, color=FAINT, linespacing=1.35)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "-|>"):
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=15, color=FAINT, lw=1.4, shrinkA=2, shrinkB=2)
    )


def draw(path: Path) -> None:
    figure = Figure(figsize=(15, 9.4), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_xlim(0, 16.3)
    axes.set_ylim(-0.1, 9.9)
    axes.axis("off")
    for name, colour, y in BANDS:
        low = y - HEIGHT[name] / 2
        axes.add_patch(FancyBboxPatch((0.1, low), RIGHT, HEIGHT[name], boxstyle="round,pad=0.02", fc=colour, ec="none"))
        axes.text(0.3, y, name, ha="left", va="center", fontsize=12, color=INK, weight="bold")
    _code_and_adapters(axes)
    _core(axes)
    _kernels_and_devices(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _code_and_adapters(axes: Axes) -> None:
    places = {"spconv": 3.2, "torchsparse": 6.35, "MinkowskiEngine": 9.5, "FlexGEMM": 12.65}
    apis = {
        "spconv": "patches of its classes,\nor a stand-in for its modules",
        "torchsparse": "patches or a stand-in;\nrelease 1.4, 2.0 or 2.1",
        "MinkowskiEngine": "a stand-in for its modules",
        "FlexGEMM": "patches or a stand-in;\nplain tensors",
    }
    imports = ["import spconv.pytorch", "import torchsparse", "import MinkowskiEngine", "import flex_gemm"]
    for (name, x), line in zip(places.items(), imports, strict=True):
        box(axes, x, 9.2, 2.95, 0.62, line)
        arrow(axes, (x, 8.86), (x, 8.0))
        box(axes, x, 7.4, 2.95, 1.12, name, apis[name])
        arrow(axes, (x, 6.8), (x, 6.05))
    box(axes, 15.05, 9.2, 1.75, 0.62, "new code")
    arrow(axes, (15.05, 8.86), (15.05, 6.05))
    axes.text(14.92, 7.4, "core.functional", rotation=90, ha="right", va="center", color=FAINT)
    for x, note in ((4.8, "a tensor is (coordinates, features)"), (11.1, "a layer is (offsets, stride, output rule)")):
        axes.text(x, 6.42, note, ha="center", va="center", fontsize=9, color=INK)


def _core(axes: Axes) -> None:
    steps = {
        3.55: ("CoordinateMap", "int [N, 1 + D], any sign;\nexact packed keys"),
        6.75: ("KernelMap", "asked for by request; built\nor prefetched once, kept in\nthe framework's own cache"),
        9.95: ("ConvPlan", "dataflow and tile;\nrule, or measured\nwinners on disk"),
        13.15: ("conv, pool", "autograd: forward, dgrad\nand wgrad are separate\nproblems"),
    }
    xs = list(steps)
    for x, (title, text) in steps.items():
        box(axes, x, 5.2, 2.7, 1.42, title, text)
    for a, b in pairwise(xs):
        arrow(axes, (a + 1.35, 5.2), (b - 1.35, 5.2))
    box(axes, 5.15, 3.85, 5.9, 0.82, "Triton dataflows", "masked and unmasked gather-GEMM")
    box(axes, 11.55, 3.85, 5.9, 0.82, "torch dataflows", "per offset (mm, bmm), explicit, one mm")
    arrow(axes, (9.6, 4.5), (6.6, 4.27))
    arrow(axes, (10.3, 4.5), (11.2, 4.27))


def _kernels_and_devices(axes: Axes) -> None:
    names = {
        3.1: ("hash table", "coordinates to rows"),
        5.6: ("neighbour table", "rows per offset, [V, N]"),
        8.1: ("mask order", "like rows together"),
        10.6: ("gather-GEMM", "forward, dgrad, epilogue"),
        13.1: ("wgrad, pooling", "no atomics on features"),
    }
    for x, (title, text) in names.items():
        box(axes, x, 2.1, 2.3, 0.95, title, text)
    arrow(axes, (5.15, 3.44), (5.15, 2.85))
    arrow(axes, (14.4, 3.44), (14.4, 0.9))
    for x, (title, text) in {
        4.3: ("NVIDIA GPU", "Triton, CUDA"),
        8.1: ("AMD GPU", "Triton, ROCm"),
        13.4: ("CPU, or a GPU without Triton", "torch alone"),
    }.items():
        box(axes, x, 0.5, 3.4 if x < 10 else 4.0, 0.72, title, text)
    for x in (4.3, 8.1):
        arrow(axes, (x, 1.35), (x, 0.9))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".png"))
