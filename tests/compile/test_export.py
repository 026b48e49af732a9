"""`torch.export` of whole networks: any number of rows, saved, and loaded by a fresh process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import sparse_bridge.compile
from tests.compile.programs import PROGRAMS, scene

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOAD = """
import sys, torch
if len(sys.argv) > 2:
    import sparse_bridge.compile
folder = sys.argv[1]
program = torch.export.load(folder + "/program.pt2")
features, coords, expected = torch.load(folder + "/scene.pt")
with torch.no_grad():
    torch.testing.assert_close(program.module()(features, coords), expected)
print("SAME")
"""


def exported(program):
    n = torch.export.Dim("n", min=2)
    rows = {"features": {0: n}, "coords": {0: n}}
    with torch.no_grad():
        return torch.export.export(program, scene(0), dynamic_shapes=rows)


def load(folder, *more):
    command = [sys.executable, "-c", LOAD, str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def round_trip(door, network, folder):
    with PROGRAMS[door]() as programs:
        program = programs[network]().eval()
        made = exported(program)
        torch.export.save(made, folder / "program.pt2")
        features, coords = scene(3)
        with torch.no_grad():
            expected = program(features, coords)
            torch.testing.assert_close(made.module()(features, coords), expected)
        torch.save((features, coords, expected), folder / "scene.pt")
    done = load(folder, "import")
    assert "SAME" in done.stdout, done.stderr[-2000:]
    return made


@pytest.mark.parametrize("door", ("spconv", "minkowski"))
def test_a_program_is_saved_and_loaded(door, tmp_path, plain_settings):
    made = round_trip(door, "three", tmp_path)
    needed = sparse_bridge.compile.needed(made)
    assert "sparse_bridge::new_map" in needed
    assert any(name.startswith("sparse_bridge::conv") for name in needed)
    assert set(needed) <= set(sparse_bridge.compile.operators())


def test_a_process_without_the_operators_says_which_are_missing(tmp_path, plain_settings):
    with PROGRAMS["spconv"]() as programs:
        torch.export.save(exported(programs["three"]().eval()), tmp_path / "program.pt2")
    failed = load(tmp_path)
    assert failed.returncode and "sparse_bridge" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("network", ("second", "unet"))
@pytest.mark.parametrize("door", tuple(PROGRAMS))
def test_networks_are_saved_and_loaded(door, network, tmp_path, plain_settings):
    with PROGRAMS[door]() as programs:
        if network not in programs:
            pytest.skip(f"{door} has no {network}")
    round_trip(door, network, tmp_path)
