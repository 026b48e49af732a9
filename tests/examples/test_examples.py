"""Each example runs, improves what it measures, and draws."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from .launch import ROOT, start, wait

pytest.importorskip("matplotlib")
import matplotlib.image

from tests.quick import quick

# The example, its picture's share of coloured pixels at least, what it is measured by, and what the
# full run reaches.
EXAMPLES = {
    "detection": (0.005, "AP at IoU 0.5", 0.8),
    "segmentation": (0.02, "mean IoU", 0.75),
    "generation": (0.02, "IoU", 0.6),
}


def run(name: str, folder: Path, *options: str) -> tuple[dict[str, list[float]], np.ndarray]:
    output = wait(start(f"examples/{name}.py", "--out", folder, *options))
    assert f"{name}.png" in output
    metrics = json.loads((folder / f"{name}.json").read_text())
    return metrics, matplotlib.image.imread(folder / f"{name}.png")[..., :3]


def check_picture(picture: np.ndarray, coloured: float) -> None:
    height, width = picture.shape[:2]
    assert height > 800 and width > 1200
    assert picture[0, 0].max() < 0.2, "the background is dark"
    assert (picture.max(-1) - picture.min(-1) > 0.25).mean() > coloured


def not_better(metrics: dict[str, list[float]]) -> list[str]:
    """Metrics for which more is better, and which training did not raise."""
    return [
        name for name, (before, after) in metrics.items()
        if not name.startswith("heading") and after <= before
    ]  # fmt: skip


@pytest.mark.parametrize("name", quick(["detection"], EXAMPLES))
def test_quick_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    metrics, picture = run(name, tmp_path, "--quick", "--device", "cpu")
    coloured, metric, _ = EXAMPLES[name]
    # The boxes of a quick run are too coarse for the usual threshold.
    before, after = metrics["AP at IoU 0.3" if name == "detection" else metric]
    assert after > before, metrics
    assert all(metrics[one] == [0, 0] for one in not_better(metrics)), metrics  # not found yet
    check_picture(picture, coloured)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detection", "segmentation"])
def test_public_definitions_learn(name: str, tmp_path: Path) -> None:
    metrics, _ = run(name, tmp_path, "--quick", "--device", "cpu", "--model", "public")
    before, after = metrics["AP at IoU 0.3" if name == "detection" else "mean IoU"]
    assert after > before, metrics


@pytest.mark.slow
def test_the_public_generator_completes(tmp_path: Path) -> None:
    options = ("--quick", "--steps", "60", "--device", "cpu", "--model", "public")
    metrics, _ = run("generation", tmp_path, *options)
    before, after = metrics["share of the missing part that was found"]
    assert after > before, metrics


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_full_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    metrics, picture = run(name, tmp_path, "--device", "cuda")
    coloured, metric, reached = EXAMPLES[name]
    before, after = metrics[metric]
    assert after > max(reached, before) and not not_better(metrics), metrics
    check_picture(picture, coloured)


def test_missing_device_is_one_clear_line(monkeypatch, capsys) -> None:
    shared = runpy.run_path(str(ROOT / "examples" / "shared.py"))
    monkeypatch.setattr("sys.argv", ["example.py", "--device", "cuda:99"])
    with pytest.raises(SystemExit) as stopped:
        shared["parse"]("an example", "example", steps=8, quick=1)
    assert stopped.value.code == 2
    assert "--device cuda:99: " in capsys.readouterr().err
