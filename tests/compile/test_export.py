"""`torch.export` of whole networks: any number of rows, saved, and loaded by a fresh process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import sparse_bridge.compile
from tests.compile.comparison import assert_same
from tests.compile.programs import DEVICES, NETWORKS, PROGRAMS, WHERE, scene
from tests.releases import WHOLE_GRAPHS, since

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOAD = """
import sys, torch
if len(sys.argv) > 2:
    import sparse_bridge.compile
folder = sys.argv[1]
program = torch.export.load(folder + "/program.pt2")
features, coords, expected = torch.load(folder + "/scene.pt")
with torch.no_grad():
    y = program.module()(features, coords)
    scale = float(expected.norm()) / expected.numel() ** 0.5
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5 + 1e-4 * scale)
print("SAME")
"""


def given(number, device):
    return tuple(tensor.to(device) for tensor in scene(number))


def exported(program, device="cpu"):
    n = torch.export.Dim("n", min=2)
    rows = {"features": {0: n}, "coords": {0: n}}
    with torch.no_grad():
        return torch.export.export(program, given(0, device), dynamic_shapes=rows)


def load(folder, *more):
    command = [sys.executable, "-c", LOAD, str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def round_trip(api, network, folder, device):
    with PROGRAMS[api]() as programs:
        program = programs[network]().eval().to(device)
        made = exported(program, device)
        torch.export.save(made, folder / "program.pt2")
        features, coords = given(3, device)
        with torch.no_grad():
            expected = program(features, coords)
            assert_same(made.module()(features, coords), expected)
        torch.save((features, coords, expected), folder / "scene.pt")
    done = load(folder, "import")
    assert "SAME" in done.stdout, done.stderr[-2000:]
    return made


@pytest.mark.sample(0)
@WHOLE_GRAPHS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("api", ("spconv", "minkowski"))
def test_a_program_is_saved_and_loaded(api, device, tmp_path, plain_settings):
    made = round_trip(api, "three", tmp_path, device)
    needed = sparse_bridge.compile.needed(made)
    assert "sparse_bridge::new_map" in needed
    assert any(name.startswith("sparse_bridge::conv") for name in needed)
    assert set(needed) <= set(sparse_bridge.compile.operators())


@pytest.mark.slow
@since(2, 9, "torch loses its own message")
def test_a_process_without_the_operators_says_which_are_missing(tmp_path, plain_settings):
    with PROGRAMS["spconv"]() as programs:
        torch.export.save(exported(programs["three"]().eval()), tmp_path / "program.pt2")
    failed = load(tmp_path)
    assert failed.returncode and "sparse_bridge" in failed.stderr


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(("api", "network"), NETWORKS)
def test_networks_are_saved_and_loaded(api, network, device, tmp_path, plain_settings):
    round_trip(api, network, tmp_path, device)
