"""A picture of the scan from above: heights, what the encoder sees, what the U-Net says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ShapeError
from .drawing import (
    Extent,
    check_png,
    colour_bar,
    metric_panel,
    new_figure,
    require_matplotlib,
    save,
)
from .voxels import VoxelGrid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_birdseye", "raster", "require_matplotlib"]

_PIXELS = 620  # raster cells along the longer side of a panel

Array = npt.NDArray[Any]


def raster(
    centers: Array, value: Array, extent: Extent, voxel_size: float
) -> npt.NDArray[np.float64]:
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
    shown = (x >= 0) & (x < shape[1]) & (y >= 0) & (y < shape[0])
    image[y[shown], x[shown]] = value[order][shown]
    return image


def draw_birdseye(
    path: Path,
    grid: VoxelGrid,
    bev: Array,
    outputs: Array,
    title: str,
    output_title: str,
) -> None:
    """Write the picture.

    Args:
        path: a `.png` file; missing folders are made.
        bev: [C, H, W] float, the encoder's dense output; it covers the whole grid.
        outputs: [V, classes] float, the U-Net's output for every voxel.
        title: of the picture; `output_title` is the third panel's.

    Raises:
        SettingError: matplotlib is missing, or `path` does not end in `.png`.
        ShapeError: `bev` or `outputs` do not belong to `grid`.
    """
    require_matplotlib()
    check_png(path)
    if bev.ndim != 3 or outputs.ndim != 2 or len(outputs) != len(grid.indices):
        raise ShapeError(
            f"got bev {list(bev.shape)} and outputs {list(outputs.shape)}; "
            f"expected [C, H, W] and [{len(grid.indices)}, classes]."
        )
    extent = _extent(grid.centers(), grid.voxel_size)
    aspect = float(np.clip((extent[3] - extent[2]) / (extent[1] - extent[0]), 0.4, 1.5))
    # One large panel as high as two small ones with the titles and axes between them.
    small = (13.4 - 1.2 / aspect) / 3
    large = 13.4 - small
    figure = new_figure((16.5, large * aspect + 1.9), title)
    panels = figure.subplot_mosaic(
        [["heights", "energy"], ["heights", "outputs"]], width_ratios=[large, small]
    )
    _draw_heights(panels["heights"], grid, extent)
    _draw_energy(panels["energy"], grid, bev, extent)
    _draw_outputs(panels["outputs"], grid, outputs, extent, output_title)
    save(figure, path)


def _extent(centers: Array, voxel_size: float) -> Extent:
    """The extent of all but the outermost 1 % of the voxels, and some air."""
    low, high = np.percentile(centers[:, :2], [0.5, 99.5], axis=0)
    margin = 0.03 * float((high - low).max()) + 4 * voxel_size
    low, high = low - margin, high + margin
    return float(low[0]), float(high[0]), float(low[1]), float(high[1])


def _draw_voxels(
    axes: Axes,
    grid: VoxelGrid,
    value: Array,
    extent: Extent,
    colours: tuple[str, float],
    limits: tuple[float, float],
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
    image = _draw_voxels(axes, grid, z, extent, ("turbo", 0.12), (low, high))
    metric_panel(axes, f"{len(z):,} voxels by height", extent)
    colour_bar(axes, image, "height z, m")


def _draw_outputs(axes: Axes, grid: VoxelGrid, outputs: Array, extent: Extent, title: str) -> None:
    norm = np.linalg.norm(outputs.astype(np.float64), axis=1)
    # Ranks, since the norms of a few voxels are far above the rest.
    rank = norm.argsort(kind="stable").argsort(kind="stable") * (100 / max(len(norm) - 1, 1))
    image = _draw_voxels(axes, grid, rank, extent, ("viridis", 0.2), (0.0, 100.0))
    metric_panel(axes, title, extent)
    colour_bar(axes, image, "output norm, percentile")


def _draw_energy(axes: Axes, grid: VoxelGrid, bev: Array, extent: Extent) -> None:
    from matplotlib.colors import PowerNorm

    energy = np.sqrt((bev.astype(np.float64) ** 2).sum(0))
    filled = energy[energy > 0]
    _, y, x = grid.shape
    full = (
        grid.origin[0],
        grid.origin[0] + x * grid.voxel_size,
        grid.origin[1],
        grid.origin[1] + y * grid.voxel_size,
    )
    image = axes.imshow(
        np.where(energy > 0, energy, np.nan),
        extent=full,
        origin="lower",
        cmap="inferno",
        norm=PowerNorm(0.5, 0.0, float(np.percentile(filled, 99.8)) if filled.size else 1.0),
        interpolation="nearest",
    )
    share = len(filled) / energy.size
    metric_panel(axes, f"SECOND: {bev.shape[0]} x {bev.shape[1]} x {bev.shape[2]} features", extent)
    colour_bar(axes, image, f"feature norm ({share:.0%} of cells filled)")
