"""Voxels as coloured cubes, seen at an angle from above."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .drawing import FAINT, INK, plain_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[Any]

_SHADE = np.array([0.62, 0.8, 1.0])  # of the faces across x, y and z: light from above


def draw_voxels(
    axes: Axes,
    cells: Array,
    colours: Array,
    title: str,
    *,
    cell_size: float = 1.0,
    scale: tuple[float, str] | None = None,
    window: Array | None = None,
    azimuth: float = 225.0,
    elevation: float = 38.0,
) -> None:
    """Fill a panel with cubes; nearer ones hide those behind.

    Args:
        cells: [V, 3] integers x, y, z, each voxel once.
        colours: [V, 3] float, red, green, blue in [0, 1].
        cell_size: edge of a voxel, in the unit of `scale`.
        scale: length and label of the scale bar along x.
        window: [W, 3] cells that fill the panel, so that several panels agree; by default `cells`.
        azimuth, elevation: direction of the eye, degrees.
    """
    from matplotlib.collections import PolyCollection

    plain_panel(axes, title)
    axes.set_xticks([]), axes.set_yticks([])
    axes.set_aspect("equal")
    toward, project = camera(azimuth, elevation)
    corners, shades, owner = visible_faces(cells, toward)
    order = np.argsort(cells[owner] @ np.sign(toward), kind="stable")
    faces = (corners[order] * cell_size) @ project.T
    paint = np.clip(colours[owner[order]] * shades[order, None], 0, 1)
    # A rim a little darker than the face keeps neighbours apart.
    cubes = PolyCollection(faces, facecolors=paint, edgecolors=paint * 0.72, linewidths=0.3)
    axes.add_collection(cubes)
    framed = (cells if window is None else window)[:, None] + np.indices((2, 2, 2)).reshape(3, 8).T
    _frame(axes, (framed.reshape(-1, 3) * cell_size) @ project.T, project, scale)


def camera(azimuth: float, elevation: float) -> tuple[Array, Array]:
    """The direction toward the eye [3], and the projection [2, 3] to the panel."""
    a, e = np.radians([azimuth, elevation])
    toward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    right = np.array([-np.sin(a), np.cos(a), 0.0])
    return toward, np.stack([right, np.cross(toward, right)])


def visible_faces(cells: Array, toward: Array) -> tuple[Array, Array, Array]:
    """Faces turned to the eye that no neighbour covers.

    Returns:
        Corners [F, 4, 3], brightness [F] and the voxel [F] that each belongs to.
    """
    cells = cells.astype(np.int64)
    low = cells.min(0) - 1
    span = cells.max(0) - low + 2
    weights = np.array([span[1] * span[2], span[2], 1])
    keys = (cells - low) @ weights
    corners, shades, owner = [], [], []
    for axis in range(3):
        side = int(toward[axis] > 0)
        covered = np.isin(keys + (2 * side - 1) * weights[axis], keys)
        visible = np.flatnonzero(~covered)
        square = np.zeros((4, 3), np.int64)
        square[:, axis] = side
        first, second = (other for other in range(3) if other != axis)
        square[[1, 2], first] = 1
        square[[2, 3], second] = 1
        corners.append(cells[visible, None] + square)
        shades.append(np.full(len(visible), _SHADE[axis]))
        owner.append(visible)
    return np.concatenate(corners), np.concatenate(shades), np.concatenate(owner)


def _frame(axes: Axes, corners: Array, project: Array, scale: tuple[float, str] | None) -> None:
    """Limits of the panel around the points [P, 2], the directions of the axes, and the scale bar where it fits."""
    least, most = corners.min(0), corners.max(0)
    width, height = most - least
    axes.set_xlim(least[0] - 0.03 * width, most[0] + 0.03 * width)
    axes.set_ylim(least[1] - 0.16 * height, most[1] + 0.04 * height)
    arm = 0.09 * min(width, height)
    corner = np.array([least[0] + 1.3 * arm, least[1] - 0.13 * height + arm * 0.6])
    for axis, name in enumerate("xyz"):
        tip = corner + arm * project[:, axis]
        axes.plot(*zip(corner, tip, strict=True), color=FAINT, linewidth=1.6)
        x, y = corner + 1.35 * arm * project[:, axis]
        axes.text(x, y, name, color=INK, ha="center", va="center", fontsize=10)
    if scale is None or abs(scale[0] * project[0, 0]) > width:
        return
    length, label = scale
    bar = length * project[:, 0]
    start = np.array([most[0] - 0.02 * width, least[1] - 0.1 * height]) - np.abs([bar[0], 0])
    bar = np.array([abs(bar[0]), bar[1] * np.sign(bar[0])])
    axes.plot(*zip(start, start + bar, strict=True), color=INK, linewidth=2.2)
    axes.text(start[0] - 0.015 * width, start[1], label, color=INK, ha="right", va="center")
