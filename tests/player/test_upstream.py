"""What times spconv itself is not deceived by our stand-in, and runs the same networks."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from tests.adapters.spconv import apis

from . import street, test_gpu, upstream, zoo


def test_the_stand_in_is_not_taken_for_it(tmp_path, monkeypatch):
    with apis.standin():
        assert not upstream.present()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    own = tmp_path / "spconv"
    own.mkdir()
    (own / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.delitem(sys.modules, "spconv", raising=False)
    assert not upstream.present()
    (own / "core_cc.cpython-312-x86_64-linux-gnu.so").touch()
    assert upstream.present()


@pytest.mark.slow
def test_the_same_network_runs_there():
    apis.wheel()
    scenes = [(f[:3000], c[:3000].contiguous()) for f, c in street.scenes_for(street.middle()[1], torch.float32)[:2]]
    theirs = upstream.measured("SparseUNet", torch.float32, False, scenes, "cpu")
    assert len(theirs["ms"]) == 2 and min(theirs["ms"]) > 0
    _, grid, n_items = street.middle()
    with zoo.network("SparseUNet", False, grid, n_items) as own, torch.no_grad():
        tensors = torch.utils._pytree.tree_leaves(own.model(*scenes[0]))
    assert theirs["rms"] == pytest.approx(upstream.sizes_of(tensors), rel=1e-3)


@pytest.mark.slow
def test_what_fails_there_is_said(tmp_path):
    apis.wheel()
    path = tmp_path / "times.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(test_gpu.ROOT), *filter(None, sys.path)])}
    words = [sys.executable, "-m", "tests.player.upstream", str(path), "SECOND:nothing"]
    subprocess.run(words, env=environment, cwd=test_gpu.ROOT, check=True)
    assert "nothing" in json.loads(path.read_text())["SECOND:nothing"]["error"]


@pytest.mark.slow
def test_programs_are_recorded_side_by_side():
    """With the bits that one process gives."""
    case = ("VoxelNeXt", torch.float16, "hip:gfx942", 64, False)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        one, other = pool.starmap(street.recorded, [case, case], chunksize=1)
    assert one == other == street.recorded(*case)


def test_time_counts_once():
    assert test_gpu.united([(0, 2), (1, 3), (1.5, 2), (5, 6)]) == 4
