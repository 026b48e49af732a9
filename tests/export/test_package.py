"""Packages: networks compiled by AOTInductor, run by a C++ program that is built here."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from sparse_bridge import __main__ as command_line
from sparse_bridge.export import export_package, package_check, package_scenes
from sparse_bridge.export.package import OLDEST
from tests.compile.programs import PROGRAMS, scene
from tests.export import operator_calls
from tests.once import once
from tests.releases import since

CALLS = pathlib.Path(operator_calls.__file__)
BACKWARDS = 2  # place among the results of a case
pytestmark = [
    since(*OLDEST, "packages cannot be built"),
    pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="no CMake or no C++ compiler"),
]


def packaged(folder, api, network, dtype=torch.float32, **more):
    """The folder of a package."""
    with PROGRAMS[api]() as programs:
        program = programs[network]().eval().to(dtype)
        scenes = [(x.to(dtype), coords) for x, coords in (scene(0), scene(3), scene(1))]
        return export_package(program, scenes[0], folder, scenes=scenes[1:], **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A package of three layers, built once for all workers, and the model."""

    def build(folder):
        with torch._inductor.config.patch(quick_compiler()):
            packaged(folder, "spconv", "three")
        package_check.build(folder)

    folder = once(tmp_path_factory, "package", build)
    with PROGRAMS["spconv"]() as programs:
        return folder, programs["three"]().eval()


def quick_compiler():
    """Settings of Inductor for one graph: precompiled headers pay from the second one on."""
    wanted = {"cpp_cache_precompile_headers": False}
    return {name: off for name, off in wanted.items() if hasattr(torch._inductor.config, name)}


def run(made, folder):
    """What the program of `made` says to its package with the scenes that `folder` holds."""
    package, _ = made
    os.link(package / "model.pt2", folder / "model.pt2")
    words = [package / "build" / "run_package", folder]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_small_package_runs_without_python(made):
    ran = package_check.check(made[0])
    assert [one.rows for one in ran] == [len(scene(number)[0]) for number in (0, 3, 1)]
    assert all(one.error < 1e-5 and one.milliseconds > 0 for one in ran)


def edges():
    x, coords = scene(0)
    beyond = torch.where(torch.arange(len(coords))[:, None] % 7 == 3, coords + 40, coords)
    return {
        "one row": (x[:1], coords[:1]),
        "repeated rows": (torch.cat([x, x[:50]]), torch.cat([coords, coords[:50]])),
        "rows outside": (x, beyond),
        "another order": (x.flip(0), coords.flip(0)),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:row .* outside of its grid:RuntimeWarning")
def test_scenes_at_the_edge(made, tmp_path):
    package_scenes.record(made[1], edges().values(), tmp_path)
    done = run(made, tmp_path)
    assert done.returncode == 0 and done.stdout.count(": ok") == len(edges()), done


@pytest.mark.slow
def test_a_scene_without_rows_is_refused_by_name(made, tmp_path):
    x, coords = scene(0)
    package_scenes.record(made[1], [(x[:2], coords[:2])], tmp_path)
    text = (tmp_path / "scenes.txt").read_text()
    (tmp_path / "scenes.txt").write_text(text.replace(" 2 2 4", " 2 0 4"))  # no rows of inputs
    done = run(made, tmp_path)
    assert done.returncode == 2
    assert "ShapeError: a layer of this package made 0 rows" in done.stderr


@pytest.mark.slow
def test_packages_that_cannot_be_read_are_refused_by_name(made, tmp_path):
    """In one line, without the frames of torch."""
    scenes = tmp_path / "scenes.txt"
    os.link(made[0] / "model.pt2", tmp_path / "model.pt2")
    package_scenes.record(made[1], [scene(0)], tmp_path)

    def refused(*words):
        command = [made[0] / "build" / "run_package", *words, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        return done.stderr

    assert "usage: run_package" in refused("--repeat", "x")
    scenes.write_text(scenes.read_text().removeprefix("scene\n"))
    assert "scenes.txt starts with input" in refused()
    scenes.write_text("")
    assert "no scene in" in refused()
    (tmp_path / "model.pt2").unlink()  # whose bytes are those of the package
    (tmp_path / "model.pt2").write_text("no archive")
    assert f"{tmp_path}/model.pt2 is no package that can be read" in refused()


@pytest.mark.slow
def test_other_results_are_noticed(made, tmp_path):
    package_scenes.record(made[1], [scene(0)], tmp_path)
    values = (tmp_path / "scenes.bin").read_bytes()
    (tmp_path / "scenes.bin").write_bytes(values[:-4096] + bytes(4096))
    done = run(made, tmp_path)
    assert done.returncode == 1 and done.stdout.count("DIFFERS") == 1


@pytest.mark.slow
def test_operators_have_the_bits_of_python(made, tmp_path):
    """Of two copies of the library in a process the first one serves."""
    library = made[0] / "build" / "libsparse_bridge_ops.so"
    again = shutil.copy(library, tmp_path / "again.so")
    words = [sys.executable, CALLS, tmp_path / "made.pt", library, again]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "made.pt")
    import sparse_bridge.compile  # noqa: F401 - registers the operators; another worker may have built the package

    with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():
        expected = operator_calls.cases()  # by MKL, as the library
    for case, results in expected.items():
        for i, (a, b) in enumerate(zip(found[case], results, strict=True)):
            assert a.dtype == b.dtype and a.shape == b.shape, (case, i)
            same = close if i == BACKWARDS and sums_equal_rows(case) else torch.equal
            assert same(a, b), (case, i)


def sums_equal_rows(case):
    """Whether a row of a result meets several rows at an offset, which add up in another order."""
    return case.startswith("submanifold") and ("repeated" in case or "both" in case)


def close(a, b):
    return bool((a.double() - b.double()).norm() <= 1e-5 * b.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("network", ("second", "unet", "pools"))
@pytest.mark.parametrize("api", ("spconv", "patched spconv"))
def test_networks_run_without_python(api, network, tmp_path, plain_settings):
    folder = packaged(tmp_path, api, network)
    assert len(package_check.check(folder)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64), ids=str)
def test_other_dtypes_run_without_python(dtype, tmp_path, plain_settings):
    folder = packaged(tmp_path, "spconv", "three", dtype, verify=True)
    assert (folder / "build" / "run_package").exists()


@pytest.mark.slow
def test_several_packages_share_a_process(made, tmp_path, plain_settings):
    other = packaged(tmp_path, "spconv", "unet")
    words = [made[0] / "build" / "run_package", "--repeat", "2", other, made[0], other]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": ok") == 9, done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "ran"), [("second", ["3000", "900"], [3000, 900]), ("unet", ["900"], [900, 450])]
)
def test_the_command_packages_and_checks(model, rows, ran, tmp_path, capsys):
    folder = tmp_path / "out"
    words = ["package", model, "--out", str(folder), "--rows", *rows, "--check", "--json"]
    assert command_line.main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["rows"] for one in said["scenes"]] == ran
    for name in ("model.pt2", "CMakeLists.txt", "main.cpp", "README.md", "operators", "scenes.txt"):
        assert (folder / name).exists()
