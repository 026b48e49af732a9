"""Packages that are damaged at random, loaded and played under the sanitizers of addresses and of
undefined behaviour."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from sparse_bridge.export.player import package_file
from sparse_bridge.export.player.library import SOURCES
from sparse_bridge.native.build import compiler
from tests.quick import quick

from .fake_gpu import built
from .networks import tiny

FUZZ = pathlib.Path(__file__).with_name("fuzz.c")
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUNS = 30_000


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    words = [*(compiler() or ["cc"]), "-std=c99", *SANITIZERS, f"-I{SOURCES}", str(FUZZ)]
    done = subprocess.run(
        [*words, str(SOURCES / "sparse_bridge_rt.c"), "-ldl", "-o", str(folder / "fuzz")],
        capture_output=True,
        text=True,
    )
    if done.returncode and "fsanitize" in done.stderr + done.stdout:
        pytest.skip("the compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    for backend in ("cuda", "hip"):
        built(backend, folder, "-DMOST=65536")
    return folder / "fuzz"


def fuzzed(program, path, runs, seed):
    """(packages that loaded, those that ran)."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    words = [str(program), str(path), str(runs), str(seed)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize("seed", quick([0], range(2)))
@pytest.mark.parametrize("targets", [("cuda:87",), ("hip:gfx942", "cuda:87", "cuda:90")], ids=len)
def test_damage_never_crashes(program, tmp_path, seed, targets):
    path = tmp_path / "model.sbp"
    package_file.write(path, list(map(tiny, targets)))
    loaded, ran = fuzzed(program, path, RUNS, seed)
    assert RUNS // 20 < loaded < RUNS and ran > RUNS // 20  # the checks are passed, and not by all
