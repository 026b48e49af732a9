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

# The example, its picture's share of coloured pixels at least, what it is measured by, and what the
# full run reaches.
EXAMPLES = {
    "detection": (0.005, "AP at IoU 0.5", 0.8),
    "segmentation": (0.02, "mean IoU", 0.75),
    "generation": (0.02, "mean IoU", 0.6),
}


def run(name: str, folder: Path, *options: str) -> tuple[dict[str, list[float]], np.ndarray]:
    output = wait(start(f"examples/{name}.py", "--out", folder, *options))
    assert f"{name}.png" in output
    runs = json.loads((folder / f"{name}.json").read_text())
    assert runs["seeds"] == [0] and list(runs["before"]) == list(runs["after"])
    metrics = {key: runs["before"][key] + runs["after"][key] for key in runs["after"]}
    assert list(metrics)[-1] in output.splitlines()[-5], "the metric that counts comes last"
    return metrics, matplotlib.image.imread(folder / f"{name}.png")[..., :3]


def check_picture(picture: np.ndarray, coloured: float) -> None:
    height, width = picture.shape[:2]
    assert height > 800 and width > 1200
    assert picture[0, 0].max() < 0.2, "the background is dark"
    assert (picture.max(-1) - picture.min(-1) > 0.25).mean() > coloured


def not_better(metrics: dict[str, list[float]]) -> list[str]:
    """Metrics for which more is better, and which training could raise and did not."""
    return [
        name
        for name, (before, after) in metrics.items()
        if not name.startswith(("heading", "IoU of the input")) and after <= before
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
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


@pytest.mark.slow
def test_several_seeds_give_a_range(tmp_path: Path) -> None:
    options = ("--quick", "--device", "cpu", "--seeds", "2", "--seed", "3")
    output = wait(start("examples/generation.py", "--out", tmp_path, *options))
    runs = json.loads((tmp_path / "generation.json").read_text())
    assert runs["seeds"] == [3, 4] and len(set(runs["after"]["mean IoU"])) == 2
    low, high = sorted(runs["after"]["mean IoU"])
    assert f"{low:.3f} to {high:.3f}" in output and "seeds 3, 4" in output
    assert len(set(runs["after"]["IoU of the input"])) == 1, "the same shapes measure every seed"


@pytest.mark.parametrize(
    ("words", "said"), [(["--device", "cuda:99"], "--device cuda:99: "), (["--seeds", "0"], "expected 1 or more")]
)
def test_options_that_cannot_be_are_one_clear_line(words, said, monkeypatch, capsys) -> None:
    shared = runpy.run_path(str(ROOT / "examples" / "shared.py"))
    monkeypatch.setattr("sys.argv", ["example.py", *words])
    with pytest.raises(SystemExit) as stopped:
        shared["parse"]("an example", "example", steps=8, quick=1)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.5], "0.500"),
        ([0.9, 0.7, 0.8], "0.700 to 0.900"),
        ([0.5, 0.5001], "0.500"),
        ([float("nan"), 0.25], "0.250"),
        ([float("nan")], "-"),
        ([10.0, 9.5], "9.500 to 10.000"),
    ],
)
def test_a_range_in_words(values, shown) -> None:
    shared = runpy.run_path(str(ROOT / "examples" / "shared.py"))
    assert shared["range_of"](values) == shown
