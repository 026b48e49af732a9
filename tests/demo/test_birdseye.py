"""The picture: written, not blank, and refused where the data do not belong together."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparse_bridge.demo.birdseye import draw_birdseye, require_matplotlib
from sparse_bridge.demo.voxels import VoxelGrid
from sparse_bridge.errors import SettingError, ShapeError


def small_grid() -> VoxelGrid:
    rng = np.random.default_rng(0)
    cells = np.unique(rng.integers(0, [32, 48, 64], (900, 3)), axis=0)
    indices = torch.from_numpy(np.pad(cells, ((0, 0), (1, 0))).astype(np.int32))
    features = torch.rand(len(cells), 4)
    return VoxelGrid(features, indices, (32, 48, 64), (-3.2, -2.4, -1.0), 0.1, len(cells))


def test_centers_are_metric() -> None:
    grid = small_grid()
    expected = np.array([-3.15, -2.35, -0.95]) + 0.1 * grid.indices[0, [3, 2, 1]].numpy()
    np.testing.assert_allclose(grid.centers()[0], expected)


def test_picture_has_three_lively_panels(tmp_path: Path) -> None:
    image_module = pytest.importorskip("matplotlib.image")
    grid, path = small_grid(), tmp_path / "new" / "folder" / "view.png"
    bev = np.random.default_rng(1).random((8, 6, 8)) * (np.arange(8) > 2)
    outputs = np.random.default_rng(2).normal(size=(len(grid.indices), 5))
    draw_birdseye(path, grid, bev, outputs, "a title", "outputs")
    image = image_module.imread(path)[..., :3]
    height, width = image.shape[:2]
    assert height > 400 and width > 1000
    assert image[0, 0].max() < 0.2, "the background is dark"
    large, small = image[:, : width // 2], image[:, 3 * width // 4 :]
    for panel in (large, small[: height // 2], small[height // 2 :]):
        coloured = (panel.max(-1) - panel.min(-1)) > 0.3
        assert coloured.mean() > 0.02
        assert len(np.unique((panel[coloured] * 15).astype(int), axis=0)) > 30


def test_single_voxel_and_empty_features_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    index = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    grid = VoxelGrid(torch.zeros(1, 4), index, (32, 16, 16), (0, 0, 0), 0.1, 1)
    draw_birdseye(tmp_path / "a.png", grid, np.zeros((4, 2, 2)), np.zeros((1, 3)), "t", "o")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    grid = small_grid()
    outputs = np.zeros((len(grid.indices), 3))
    with pytest.raises(ShapeError, match="expected"):
        draw_birdseye(tmp_path / "a.png", grid, np.zeros((4, 4)), outputs, "t", "o")
    with pytest.raises(ShapeError, match="expected"):
        draw_birdseye(tmp_path / "a.png", grid, np.zeros((1, 4, 4)), outputs[1:], "t", "o")
    with pytest.raises(SettingError, match=r"\.png"):
        draw_birdseye(tmp_path / "a.jpg", grid, np.zeros((1, 4, 4)), outputs, "t", "o")


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingError, match=r'pip install "sparse-bridge\[viz\]"'):
        require_matplotlib()
