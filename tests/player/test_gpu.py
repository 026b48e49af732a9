"""Packages on the GPU that is here: results of Python's layers over 40 scenes, in every bit where layers of torch take
no part, through the library and by the C program alone, with what it costs.

`python -m pytest -m gpu -s tests/player/test_gpu.py` prints a table; it takes cc."""

from __future__ import annotations

import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import time

import pytest
import torch

from sparse_bridge import settings, tolerances
from sparse_bridge.export import load_package, package_scenes
from sparse_bridge.export.player import package_file, stand_in
from sparse_bridge.export.player.entry import flattened
from sparse_bridge.export.player.library import DEVICE, SOURCES, call
from sparse_bridge.export.player.record import record
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.native.build import compiler
from sparse_bridge.tools.demo.voxels import street_voxels

from . import zoo

pytestmark = pytest.mark.gpu
ROWS, SCENES, RUNS = 160_000, 40, 5  # of the street; its middle has fewer rows


CASES = [(name, dtype) for name in zoo.NAMES for dtype in (torch.float32, torch.float16)]


def scenes_of(dtype):
    """(scenes, grid, batch items): the middle of a street with all its rows, and parts of it of any size."""
    coords, (z, y, x), n_items = street_voxels(ROWS)
    grid = (z, y // 64 * 16, x // 64 * 16)
    coords = coords - torch.tensor([0, 0, 3 * y // 8, 3 * x // 8], dtype=torch.int32)
    coords = coords[((coords >= 0) & (coords < torch.tensor([n_items, *grid]))).all(1)]
    generator = torch.Generator().manual_seed(0)
    scenes = []
    for i in range(SCENES):
        n_rows = len(coords) if i == 0 else int(len(coords) * (0.2 + 0.8 * i / SCENES))
        rows = torch.randperm(len(coords), generator=generator)[:n_rows]
        features = torch.randn(n_rows, 4, generator=generator).to(dtype)
        scenes.append((features, coords[rows].contiguous()))
    return scenes, grid, n_items


def present(monkeypatch):
    """The name of the GPU that is here, whose number of multiprocessors tiles are chosen by."""
    own = targets.of(torch.device("cuda"))
    monkeypatch.setattr(stand_in, "COMPUTE_UNITS", own.compute_units)
    return f"cuda:{own.capability}" if own.backend == "cuda" else f"hip:{own.arch}"


def by_python(own, model, scenes):
    """(outputs of every scene, milliseconds of each), after the calls in which layers learn what follows them."""
    outputs, times = [], []
    for i, scene in enumerate([*scenes[:3], *scenes]):
        inputs = own.inputs(*[tensor.cuda() for tensor in scene])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = model(*inputs)
        torch.cuda.synchronize()
        if i >= 3:
            times.append(1e3 * (time.perf_counter() - begin))
            outputs.append([tensor.cpu() for tensor in package_scenes.tensors_of(flattened(result))])
    return outputs, times


def write_folder(folder, program, scenes, outputs, exact):
    """A package whose recorded results have to agree, in every bit where they are exact."""
    shutil.copytree(SOURCES, folder)
    package_file.write(folder / "model.sbp", [program])
    recorded = iter(outputs)
    package_scenes.record(lambda *_: next(recorded), scenes, folder)
    if exact:
        text = folder / "scenes.txt"
        text.write_text(re.sub(r"^output \S+", "output 0", text.read_text(), flags=re.MULTILINE))


def busy(run):
    """Milliseconds in which the GPU works on a call, copies included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    total, end = 0.0, -math.inf
    cuda = torch.autograd.DeviceType.CUDA
    for span in sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == cuda):
        total, end = total + max(span[1] - max(span[0], end), 0.0), max(end, span[1])
    return total / 1e3


def ratios(package, scenes):
    """Wall over busy of runs of every scene, with inputs on the GPU; median of the wall, in milliseconds."""
    walls, over = [], []
    for features, coords in scenes:
        features, coords = features.cuda(), coords.cuda()
        torch.cuda.synchronize()

        def run(coords=coords, features=features):
            call("run", package._instance, DEVICE, coords.data_ptr(), features.data_ptr(), len(coords))

        run()
        worked = busy(run)
        for _ in range(RUNS):
            begin = time.perf_counter()
            run()
            walls.append(1e3 * (time.perf_counter() - begin))
            over.append(walls[-1] / worked if worked else math.nan)
    return over, statistics.median(walls)


def by_library(path, scenes, outputs, graph):
    """(a line of figures, scenes whose bits differ, the largest error over the RMS, bytes beside the plan)."""
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    package = load_package(path, graph=graph)
    taken = before - torch.cuda.mem_get_info()[0]
    different, worst = 0, 0.0
    for (features, coords), wanted in zip(scenes, outputs, strict=True):
        own = package(coords, features)
        same = all(torch.equal(mine, theirs) for mine, theirs in zip(own, wanted, strict=True))
        different += not same
        for mine, theirs in zip(own, wanted, strict=True):
            if mine.is_floating_point() and mine.shape == theirs.shape:
                error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
                worst = max(worst, float(error))
    over, wall = ratios(package, scenes)
    package.close()
    over.sort()
    line = (
        f"{'one graph' if graph else 'step by step'}: {wall:.3f} ms, wall/busy {statistics.median(over):.3f}, "
        f"p90 {over[int(0.9 * len(over))]:.3f}; memory {taken / 2**20:.0f} MiB"
    )
    return line, different, worst, taken


def by_program(folder):
    """(exit status, lines, seconds from the start of the process to its first result)."""
    program = folder / "run_package"
    words = [*(compiler() or ["cc"]), "-std=c99", "-O2", str(folder / "example.c"), str(folder / "sparse_bridge_rt.c")]
    subprocess.run([*words, "-ldl", "-lm", "-o", str(program)], check=True)
    begin = time.perf_counter()
    started = subprocess.Popen([program, folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert started.stdout is not None
    said = os.read(started.stdout.fileno(), 1)  # how long the first scene took, before its results are compared
    first = time.perf_counter() - begin
    lines = (said + started.stdout.read()).decode().splitlines()
    return started.wait(), lines, first


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_a_package_gives_the_results_of_pythons_layers(tmp_path, monkeypatch, capsys, name, dtype):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # else others take memory of the GPU, too, and time
    scenes, grid, n_items = scenes_of(dtype)
    folder = pathlib.Path(tmp_path / "package")
    with zoo.network(name, True, grid, n_items) as own, settings.override(tune="off"), torch.no_grad():
        # Tiles by rule, as packages have them.
        if own.grid != grid:  # of other axes
            scenes = [(features, coords[:, [0, 2, 3, 1]].contiguous()) for features, coords in scenes]
        model = own.model.to(dtype)
        begin = time.perf_counter()
        program = record(model, own.inputs(*scenes[0]), len(scenes[0][0]), present(monkeypatch))
        took = time.perf_counter() - begin
        outputs, python = by_python(own, model.cuda(), scenes)
    write_folder(folder, program, scenes, outputs, own.exact)
    figures = [by_library(folder / "model.sbp", scenes, outputs, graph) for graph in (False, True)]
    status, lines, first = by_program(folder)
    report = [
        f"{name} {dtype}: {torch.cuda.get_device_name()}, {program.target}, {len(scenes[0][0])} rows at most",
        f"  recorded and compiled in {took:.0f} s; {len(program.steps)} steps, {len(program.kernels)} kernels",
        f"  plan {program.memory / 2**20:.0f} MiB; Python's layers {statistics.median(python):.3f} ms",
    ]
    for line, different, worst, _ in figures:
        report.append(f"  {line}; {SCENES - different} of {SCENES} equal in bits, error {worst:.2g} of the RMS")
    equal = sum(": ok" in line for line in lines)
    kind = "equal in bits" if own.exact else "within the tolerance"
    report.append(f"  C program: status {status}, {equal} of {SCENES} {kind}, first result after {first:.3f} s")
    if status:
        report.append("  " + next(line for line in lines if ": ok" not in line).strip())
    text = "\n".join(report) + "\n"
    with capsys.disabled():
        print("\n" + text)
    if "OUT" in os.environ:  # where a machine without a terminal keeps what it did
        with (pathlib.Path(os.environ["OUT"]) / "packages.txt").open("a") as file:
            file.write(text)
    for _, different, worst, taken in figures:
        assert worst <= tolerances.of("network", dtype).rms
        assert different == 0 or not own.exact, f"{different} of {SCENES} scenes differ, by {worst:.2g} of the RMS"
        if alone:
            assert taken <= program.memory
    assert status == 0 and sum(": ok" in line for line in lines) == SCENES
