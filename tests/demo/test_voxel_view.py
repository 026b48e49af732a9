"""Cubes: which faces are drawn, in which order, in which colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparse_bridge.tools.demo import voxel_view
from sparse_bridge.tools.demo.voxel_view import draw_voxels

pytest.importorskip("matplotlib")


def test_covered_faces_are_left_out() -> None:
    toward, project = voxel_view.camera(225, 38)
    np.testing.assert_allclose(project @ toward, 0, atol=1e-12)
    block = np.argwhere(np.ones((4, 5, 6)))
    corners, shades, owner = voxel_view.visible_faces(block, toward)
    assert len(corners) == 4 * 5 + 5 * 6 + 4 * 6, "three sides of a solid block"
    assert sorted(set(shades)) == sorted(voxel_view._SHADE)
    # The eye stands at low x, low y, high z.
    seen = block[owner]
    assert ((seen[:, 0] == 0) | (seen[:, 1] == 0) | (seen[:, 2] == 5)).all()
    for axis, side in ((0, 0), (1, 0), (2, 6)):
        flat = (corners[:, :, axis] == side).all(1)
        assert flat.sum() == len(block) // (4, 5, 6)[axis]


def test_negative_cells_and_single_voxels() -> None:
    toward, _ = voxel_view.camera(30, 20)
    corners, _, owner = voxel_view.visible_faces(np.array([[-7, 3, -1]]), toward)
    assert corners.shape == (3, 4, 3) and (owner == 0).all()
    assert corners.reshape(-1, 3).min(0).tolist() == [-7, 3, -1]
    assert corners.reshape(-1, 3).max(0).tolist() == [-6, 4, 0]


def test_nearer_cubes_hide_those_behind(tmp_path: Path) -> None:
    import matplotlib.image

    from sparse_bridge.tools.demo.drawing import legend, new_figure, save

    red, green = np.array([[1.0, 0, 0]]), np.array([[0, 1.0, 0]])
    cells = np.array([[0, 0, 0], [3, 3, 3]])  # along the line of sight of (225, 35.3)
    shares = []
    for name, colours in (("a", [red, green]), ("b", [green, red])):
        figure = new_figure((5, 5), "two cubes")
        axes = figure.subplots()
        order = [0, 1] if name == "a" else [1, 0]
        paint = np.concatenate(colours)
        draw_voxels(axes, cells[order], paint, "cubes", scale=(1.0, "1 m"), azimuth=45, elevation=35.26)
        legend(figure, {"one": "red"}, loc="outside lower center")
        path = tmp_path / "new" / f"{name}.png"
        save(figure, path)
        image = matplotlib.image.imread(path)[..., :3]
        greens = (image[..., 1] > 0.4) & (image[..., 0] < 0.1)
        reds = (image[..., 0] > 0.4) & (image[..., 1] < 0.1)
        shares.append((reds[: len(reds) * 4 // 5].sum(), greens.sum()))
    # In both drawings (3, 3, 3) is green and stands exactly before (0, 0, 0).
    for reds, greens in shares:
        assert greens > 500 and reds < greens / 50
    assert shares[0] == shares[1], "the order of the rows does not matter"
