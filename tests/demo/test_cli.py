"""The demo as a user runs it, in a process of its own, with whichever spconv answers the import."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparse_bridge.errors import SettingError
from sparse_bridge.tools.demo import cli
from sparse_bridge.tools.demo.scene import street_scan
from tests.patience import PATIENCE


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(cli.__file__).parents[3])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    # One thread: tests share their cores, and waiting threads would spin.
    settings = {"COLUMNS": "160", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "sparse_bridge", "demo", "--device", "cpu", *options],
        cwd=folder,
        env={**os.environ, **settings, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if "No module named 'spconv" in result.stderr:
        pytest.skip("nothing answers `import spconv`")
    return result


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scan = street_scan(azimuths=120)
    scan[np.linalg.norm(scan[:, :2], axis=1) < 25].tofile(tmp_path / "tiny.bin")
    options = ("--points", "tiny.bin", "--small", "--repeats", "1", "--voxel-size", "0.2")
    options += ("--segment", "1", "--layers")
    result = demo(tmp_path, *options, "--output", "out", "--json", "out/figures.json")
    assert result.returncode == 0, result.stdout + result.stderr
    text = result.stdout
    assert "tiny.bin" in text and "SECOND encoder: 12 sparse layers" in text
    results = [text.index(word) for word in ("Times", "Labels after", "SECOND encoder: 12")]
    assert results == sorted(results), "rows of layers come after the results"
    for layer in ("conv_input.conv", "conv_out.conv", "encoder.1.down.conv", "decoder.4.up.conv"):
        row = next(line for line in text.splitlines() if layer in line)
        assert " > " in row
    assert "Labels after 1 training steps" in text and "this scan has no labels" in text
    assert "residual U-Net, inference" in text and "picture: out/birdseye.png" in text
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert [len(one["layers"]) > 10 for one in figures["networks"]] == [True, True]
    assert figures["iou"] is None and figures["voxelise_ms"] > 0
    assert all(one["passes"] == [one["ms"]] for one in figures["networks"])
    assert (tmp_path / "out" / "birdseye.png").stat().st_size > 20_000


def test_errors_are_messages_not_tracebacks(tmp_path: Path) -> None:
    result = demo(tmp_path, "--points", "absent.bin", "--no-picture")
    assert result.returncode == 2
    assert "absent.bin: no such file" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.slow
def test_training_without_a_picture(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", street_scan(azimuths=24))
    options = ("--small", "--repeats", "1", "--voxel-size", "0.4", "--train", "2", "--no-picture")
    options += ("--segment", "0")
    result = demo(tmp_path, "--points", "a.npy", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "conv_input" not in result.stdout, "a row per layer is for --layers"
    for network in ("SECOND encoder", "residual U-Net"):
        row = next(line for line in result.stdout.splitlines() if network + ", training" in line)
        first, last = row.split("loss")[1].strip(" │").split(" > ")
        assert float(last) < float(first)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


@pytest.mark.slow
def test_one_voxel_per_level(tmp_path: Path) -> None:
    points = np.array([[3.0, 2.0, 0.5, 0.2], [3.01, 2.01, 0.51, 0.3]], np.float32)
    np.save(tmp_path / "one.npy", points)
    options = ("--points", "one.npy", "--small", "--repeats", "1", "--segment", "0")
    result = demo(tmp_path, *options, "--voxel-size", "1", "--no-picture")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 of 100 cm" in result.stdout
    result = demo(tmp_path, *options, "--voxel-size", "1", "--no-picture", "--train")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "batch norm learns from 2 or more" in " ".join(result.stderr.split())


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.png").mkdir()
    for output in ("file/view.png", "folder.png"):
        result = demo(tmp_path, "--output", output)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert f"--output {output}" in " ".join(result.stderr.split()) and not result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_parser_joins_other_commands() -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["demo", "--train", "--range", "0", "0", "0", "1", "1", "1"])
    assert args.func is cli.run and args.train == 3 and args.range[3] == 1.0
    assert parser.parse_args(["demo", "--train", "5"]).train == 5
    assert parser.parse_args(["demo"]).train == 0
    for bad in (["--device", "tpu"], ["--dtype", "fp8"], ["--voxel-size", "wide"]):
        with pytest.raises(SystemExit):
            parser.parse_args(["demo", *bad])


@pytest.mark.parametrize(
    ("options", "text"), [(["--output", "view.jpg"], "expected a folder"), (["--points", "absent.bin"], "no such file")]
)
def test_bad_options(options: list[str], text: str) -> None:
    pytest.importorskip("matplotlib")
    parser = argparse.ArgumentParser()
    cli.configure(parser)
    with pytest.raises(SettingError, match=text):
        cli.run(parser.parse_args(options))
