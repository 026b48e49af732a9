"""The demo's picture: the classes found in a scan, the truth, and the scan from above."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .drawing import Extent, check_png, colour_bar, legend, metric_panel, new_figure, require_matplotlib, save
from .segmentation import CLASSES, COLOURS, Labelled
from .voxel_view import draw_voxels
from .voxels import VoxelGrid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_birdseye", "raster"]

_PIXELS = 620  # raster cells along the longer side of a panel

Array = npt.NDArray[Any]


def raster(centers: Array, value: Array, extent: Extent, voxel_size: float) -> npt.NDArray[np.float64]:
    """Values of the topmost voxels as an image [y, x] of cells no finer than a voxel.

    Cells without a voxel are NaN.

    Args:
        centers: [V, 3] metres.
        value: [V].
    """
    width, height = extent[1] - extent[0], extent[3] - extent[2]
    cell = max(width, height, _PIXELS * voxel_size) / _PIXELS
    shape = (max(round(height / cell), 1), max(round(width / cell), 1))
    image = np.full(shape, np.nan)
    order = np.argsort(centers[:, 2], kind="stable")  # the last write wins: the highest voxel
    x = np.floor((centers[order, 0] - extent[0]) / cell).astype(int)
    y = np.floor((centers[order, 1] - extent[2]) / cell).astype(int)
    visible = (x >= 0) & (x < shape[1]) & (y >= 0) & (y < shape[0])
    image[y[visible], x[visible]] = value[order][visible]
    return image


def draw_birdseye(path: Path, grid: VoxelGrid, labelled: Labelled | None, title: str) -> None:
    """Write the picture: what a network found in the scan, the truth if known, and the heights.

    Args:
        path: a `.png` file; missing folders are made.
        labelled: None draws the heights alone.

    Raises:
        SettingError: matplotlib is missing, or `path` does not end in `.png`.
    """
    require_matplotlib()
    check_png(path)
    extent = _extent(grid.centers(), grid.voxel_size)
    if labelled is None:
        figure = new_figure((12, 10), title)
        _draw_heights(figure.subplots(), grid, extent)
    else:
        figure = _draw_classes(labelled, grid, extent, title)
    save(figure, path)


def _draw_classes(labelled: Labelled, grid: VoxelGrid, extent: Extent, title: str) -> Figure:
    truth, iou = labelled.scan.labels, labelled.iou()
    mean = "" if iou is None else f": mean IoU {np.nanmean(iou):.2f}"
    figure = new_figure((15, 15), title + mean)
    below: list[Any] = ["heights", "heights"] if truth is None else ["truth", "heights"]
    panels = figure.subplot_mosaic([["found", "found"], below], height_ratios=[1.25, 1])
    steps = f"after {len(labelled.losses)} training steps ({labelled.seconds:.0f} s)"
    _draw_cubes(panels["found"], labelled, labelled.classes, f"classes found {steps}")
    if truth is not None:
        name = f"truth: {len(truth):,} voxels of {labelled.voxel_size * 100:g} cm"
        _draw_cubes(panels["truth"], labelled, truth, name)
    _draw_heights(panels["heights"], grid, extent)
    words = list(CLASSES)
    if iou is not None:
        words = [f"{name}: IoU {value:.2f}" for name, value in zip(words, iou, strict=True)]
    colours = dict(zip(words, COLOURS, strict=True))
    legend(figure, colours, loc="outside lower center", ncols=3, fontsize=16)
    return figure


def _draw_cubes(axes: Axes, labelled: Labelled, labels: Array, title: str) -> None:
    from matplotlib.colors import to_rgb

    paint = np.array([to_rgb(colour) for colour in COLOURS])[labels]
    size = labelled.voxel_size
    draw_voxels(axes, labelled.scan.cells, paint, title, cell_size=size, scale=(10.0, "10 m"))


def _extent(centers: Array, voxel_size: float) -> Extent:
    """The extent of all but the outermost 1 % of the voxels, and some air."""
    low, high = np.percentile(centers[:, :2], [0.5, 99.5], axis=0)
    margin = 0.03 * float((high - low).max()) + 4 * voxel_size
    low, high = low - margin, high + margin
    return float(low[0]), float(high[0]), float(low[1]), float(high[1])


def _draw_voxels(
    axes: Axes, grid: VoxelGrid, value: Array, extent: Extent, colours: tuple[str, float], limits: tuple[float, float]
) -> Any:
    """One value per voxel; `colours` are a map's name and the share of it to skip.

    The darkest part of a map would vanish in the background.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    name, start = colours
    return axes.imshow(
        raster(grid.centers(), value, extent, grid.voxel_size),
        extent=extent,
        origin="lower",
        cmap=ListedColormap(colormaps[name](np.linspace(start, 1.0, 256))),
        vmin=limits[0],
        vmax=limits[1],
        interpolation="nearest",
    )


def _draw_heights(axes: Axes, grid: VoxelGrid, extent: Extent) -> None:
    z = grid.centers()[:, 2]
    low, high = (float(value) for value in np.percentile(z, [1, 99]))
    image = _draw_voxels(axes, grid, z, extent, ("viridis", 0.2), (low, high))
    metric_panel(axes, f"{len(z):,} voxels by height", extent)
    colour_bar(axes, image, "height z, m")
