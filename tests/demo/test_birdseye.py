"""The picture: written, and not blank."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparse_bridge.errors import SettingError
from sparse_bridge.tools.demo import birdseye
from sparse_bridge.tools.demo.birdseye import draw_birdseye
from sparse_bridge.tools.demo.drawing import require_matplotlib
from sparse_bridge.tools.demo.segmentation import CLASSES, Labelled, Sample
from sparse_bridge.tools.demo.voxels import VoxelGrid


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


def labelled(truth: bool) -> Labelled:
    rng = np.random.default_rng(2)
    cells = np.unique(rng.integers(0, 12, (300, 3)), axis=0).astype(np.int32)
    classes = np.arange(len(cells)) % len(CLASSES)
    scan = Sample(cells, np.ones((len(cells), 3), np.float32), classes if truth else None)
    return Labelled(scan, np.roll(classes, 1), 0.3, [1.0, 0.5], 2.0)


@pytest.mark.parametrize("truth", [True, False])
def test_panels_are_lively(truth: bool, tmp_path: Path) -> None:
    image_module = pytest.importorskip("matplotlib.image")
    path = tmp_path / "new" / "folder" / "view.png"
    draw_birdseye(path, small_grid(), labelled(truth), "a title")
    image = image_module.imread(path)[..., :3]
    height, width = image.shape[:2]
    assert height > 1000 and width > 1000
    assert image[0, 0].max() < 0.2, "the background is dark"
    below = image[height // 2 :]
    panels = [image[: height // 2]]
    panels += [below[:, : width // 2], below[:, width // 2 :]] if truth else [below]
    for panel in panels:
        coloured = (panel.max(-1) - panel.min(-1)) > 0.3
        assert coloured.mean() > 0.02
        assert len(np.unique((panel[coloured] * 15).astype(int), axis=0)) > 30


def test_the_title_is_the_mean_intersection_over_union(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    titles: list[str] = []
    figures: list[Any] = []
    monkeypatch.setattr(birdseye, "save", lambda figure, path: figures.append(figure))
    one = labelled(True)
    for made in (one, labelled(False)):
        draw_birdseye(tmp_path / "a.png", small_grid(), made, "a scan")
        titles.append(figures[-1].get_suptitle())
    assert not any("IoU" in axes.get_title() for axes in figures[0].axes), "said once"
    assert titles == [f"a scan: mean IoU {np.nanmean(one.iou()):.2f}", "a scan"]
    words = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert [word.partition(": IoU ")[0] for word in words] == list(CLASSES)


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.filterwarnings("error")  # of a layout that finds no room
def test_single_voxel_is_drawn(labels: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    index = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    grid = VoxelGrid(torch.zeros(1, 4), index, (32, 16, 16), (0, 0, 0), 0.1, 1)
    scan = Sample(np.zeros((1, 3), np.int32), np.ones((1, 3), np.float32), np.zeros(1, np.int64))
    one = Labelled(scan, np.zeros(1, np.int64), 0.3, [1.0], 1.0) if labels else None
    draw_birdseye(tmp_path / "a.png", grid, one, "t")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_only_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SettingError, match=r"\.png"):
        draw_birdseye(tmp_path / "a.jpg", small_grid(), None, "t")


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingError, match=r'pip install "sparse-bridge\[viz\]"'):
        require_matplotlib()
