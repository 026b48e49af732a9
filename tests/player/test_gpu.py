"""Packages on the GPU that is here: results of Python's layers over 40 scenes, in every bit where layers of torch take
no part, through the library and by the C program alone, with what it costs beside Python's layers and spconv's.

`python -m pytest -m gpu -s tests/player/test_gpu.py` prints a table; it takes a C compiler. Where spconv's wheel for
CUDA is on the path, it is timed over the same scenes. What is printed is appended to $OUT/packages.txt."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

import pytest
import torch

from sparse_bridge import settings, tolerances
from sparse_bridge.export import load_package, package_scenes
from sparse_bridge.export.player import package_file
from sparse_bridge.export.player.entry import flattened
from sparse_bridge.export.player.library import DEVICE, SOURCES, call
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.native.build import compiler
from tests.patience import PATIENCE

from . import street, upstream, zoo

pytestmark = pytest.mark.gpu
RUNS = 5  # of every scene
MOST_BYTES = 256 << 20  # of results that are recorded for the C program, which compares them
CASES = [(name, dtype) for name in zoo.NAMES for dtype in (torch.float32, torch.float16)]
ROOT = pathlib.Path(__file__).parents[2]
COLUMNS = ("network", "dtype", "spconv", "layers", "package", "as one graph", "GPU busy", "of that")


def alone():
    """Whether no other tests take memory of the GPU, and time."""
    return "PYTEST_XDIST_WORKER" not in os.environ


def target_here():
    """(name of the GPU that is here, its multiprocessors, by which tiles are chosen)."""
    own = targets.of(torch.device("cuda"))
    return f"cuda:{own.capability}" if own.backend == "cuda" else f"hip:{own.arch}", own.compute_units


def printed(text, capsys=None):
    """Print lines at once, and keep them where a machine without a terminal keeps what it did."""
    if capsys is None:
        print("\n" + text)
    else:
        with capsys.disabled():
            print("\n" + text)
    if "OUT" in os.environ:
        with (pathlib.Path(os.environ["OUT"]) / "packages.txt").open("a") as file:
            file.write(text + "\n")


@pytest.fixture(scope="session")
def asked_for(request):
    """The cases of this run."""
    items = [item for item in request.session.items if item.path == pathlib.Path(__file__)]
    return [(item.callspec.params["name"], item.callspec.params["dtype"]) for item in items]


class Programs(dict):
    """By case, compiled when it is asked for."""

    def __missing__(self, case):
        program = self[case] = street.recorded(*case, *target_here())
        return program


@pytest.fixture(scope="session")
def programs(asked_for):
    """By case, compiled side by side: a network of 40 kernels takes one core half a minute."""
    if not alone():  # the other workers do the same meanwhile
        return Programs()
    n_cores = os.cpu_count() or 1
    context, threads = multiprocessing.get_context("spawn"), max(1, n_cores // len(asked_for))
    work = [(*case, *target_here()) for case in asked_for]
    torch.cuda.init()
    with pytest.MonkeyPatch.context() as patch:  # none of them needs the GPU, and memory of it is measured here
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            patch.setenv(name, "")
        with context.Pool(min(len(asked_for), n_cores), torch.set_num_threads, (threads,)) as pool:
            done = pool.starmap(street.recorded, work, chunksize=1)
            pool.close()
            pool.join()
    return dict(zip(asked_for, done, strict=True))


@pytest.fixture(scope="session")
def of_spconv(asked_for, tmp_path_factory):
    """What `upstream` says of the cases that are spconv's; nothing where it is not installed."""
    cases = [f"{name}:{dtype}".replace("torch.", "") for name, dtype in asked_for if name in zoo._SPCONV]
    if not cases or not upstream.present():
        return {}
    path = tmp_path_factory.mktemp("spconv") / "times.json"
    words = [sys.executable, "-m", "tests.player.upstream", str(path), *cases]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    try:
        subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return json.loads(path.read_text())
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        words = str(error.stderr or error).strip().splitlines()
        return {case: {"error": words[-1]} for case in cases}


@pytest.fixture(scope="session")
def run_package(tmp_path_factory):
    """The example in C, built."""
    program = tmp_path_factory.mktemp("example") / "run_package"
    sources = [str(SOURCES / name) for name in ("example.c", "sparse_bridge_rt.c")]
    words = [*(compiler() or ["cc"]), "-std=c99", "-O2", *sources, "-ldl", "-lm", "-o", str(program)]
    subprocess.run(words, check=True)
    return program


def by_python(own, model, scenes):
    """(outputs of every scene, milliseconds of each)."""
    outputs = []

    def run(features, coords):
        return model(*own.inputs(features, coords.clone()))  # a scene that nobody has seen: its maps are built

    on_gpu = [tuple(tensor.cuda() for tensor in scene) for scene in scenes]
    for scene in [*on_gpu[:3], *on_gpu]:  # layers have to learn what follows them
        tensors = package_scenes.tensors_of(flattened(run(*scene)))
        outputs.append([tensor.cpu() for tensor in tensors])
    return outputs[3:], upstream.timed(run, on_gpu, "cuda")


def write_folder(folder, program, scenes, outputs, exact):
    """A package whose recorded results have to agree, in every bit where they are exact; how many scenes it holds."""
    shutil.copytree(SOURCES, folder)
    package_file.write(folder / "model.sbp", [program])
    size = sum(tensor.numel() * tensor.itemsize for tensor in outputs[0])
    few = scenes[: max(4, MOST_BYTES // size)]
    recorded = iter(outputs)
    package_scenes.record(lambda *_: next(recorded), few, folder)
    if exact:
        text = folder / "scenes.txt"
        text.write_text(re.sub(r"^output \S+", "output 0", text.read_text(), flags=re.MULTILINE))
    return len(few)


def busy(run, scenes):
    """Milliseconds in which the GPU works on a call over each scene, copies included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for scene in scenes:
            run(*scene)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == cuda)
    each, rest = divmod(len(spans), len(scenes))
    if rest and len(scenes) > 1:  # what a scene takes cannot be told from what the next one does
        return [busy(run, [scene])[0] for scene in scenes]
    return [united(spans[i * each : (i + 1) * each]) / 1e3 for i in range(len(scenes))]


def united(spans):
    """How long any of these spans, in order, lasts."""
    total, end = 0.0, -math.inf
    for start, stop in spans:
        total, end = total + max(stop - max(start, end), 0.0), max(end, stop)
    return total


def ratios(package, scenes):
    """(median of milliseconds of runs of every scene, with inputs on the GPU; wall over busy of each, in order; median
    of busy)."""

    def run(features, coords):
        call("run", package._instance, DEVICE, coords.data_ptr(), features.data_ptr(), len(coords))

    on_gpu = [tuple(tensor.cuda() for tensor in scene) for scene in scenes]
    torch.cuda.synchronize()
    for scene in on_gpu:
        run(*scene)
    worked = busy(run, on_gpu)
    walls, over = [], []
    for scene, its in zip(on_gpu, worked, strict=True):
        run(*scene)
        for _ in range(RUNS):
            begin = time.perf_counter()
            run(*scene)
            walls.append(1e3 * (time.perf_counter() - begin))
            over.append(walls[-1] / its if its else math.nan)
    return statistics.median(walls), sorted(over), statistics.median(worked)


def by_library(path, scenes, outputs, graph):
    """(a line of figures, milliseconds of a run and of the GPU's work, scenes whose bits differ, the largest error over
    the RMS, bytes that it took)."""
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    package = load_package(path, graph=graph)
    taken, different, worst = 0, 0, 0.0
    for (features, coords), wanted in zip(scenes, outputs, strict=True):
        own = package(coords, features)
        taken = taken or before - torch.cuda.mem_get_info()[0]  # drivers may load kernels when they are launched
        if all(torch.equal(mine, theirs) for mine, theirs in zip(own, wanted, strict=True)):
            continue
        different += 1
        for mine, theirs in zip(own, wanted, strict=True):
            if mine.is_floating_point():
                a, b = mine.cuda().double(), theirs.cuda().double()
                worst = max(worst, float((a - b).norm() / b.norm()) if a.shape == b.shape else math.inf)
    wall, over, worked = ratios(package, scenes)
    package.close()
    line = (
        f"{'one graph' if graph else 'step by step'}: {wall:.3f} ms, GPU busy {worked:.3f} ms, "
        f"wall/busy {statistics.median(over):.3f}, p90 {over[int(0.9 * len(over))]:.3f}; "
        f"memory {taken / 2**20:.1f} MiB"
    )
    return line, (wall, worked), different, worst, taken


def by_program(program, folder):
    """(exit status, lines, seconds from the start of the process to its first result)."""
    begin = time.perf_counter()
    started = subprocess.Popen([program, folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert started.stdout is not None
    said = os.read(started.stdout.fileno(), 1)  # how long the first scene took, before its results are compared
    first = time.perf_counter() - begin
    lines = (said + started.stdout.read()).decode().splitlines()
    return started.wait(), lines, first


@pytest.fixture(scope="session")
def table():
    """The head of the table, once."""
    printed("milliseconds, medians over the scenes\n" + "| " + " | ".join(COLUMNS) + " |\n" + "|---" * 8 + "|")


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_a_package_gives_the_results_of_pythons_layers(
    tmp_path, monkeypatch, capsys, programs, of_spconv, run_package, table, name, dtype
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    _, grid, n_items = street.middle()
    program, folder, begin = programs[name, dtype], pathlib.Path(tmp_path / "package"), time.perf_counter()
    with zoo.network(name, True, grid, n_items) as own, settings.override(tune="off"), torch.no_grad():
        scenes = street.scenes_for(own.grid, dtype)
        outputs, python = by_python(own, own.model.to(dtype).cuda(), scenes)
    n_recorded = write_folder(folder, program, scenes, outputs, own.exact)
    figures = [by_library(folder / "model.sbp", scenes, outputs, graph) for graph in (False, True)]
    status, lines, first = by_program(run_package, folder)
    shutil.rmtree(folder)
    report = [
        f"{name} {dtype}: {torch.cuda.get_device_name()}, {program.target}, {len(scenes[0][0])} rows at most",
        f"  {len(program.steps)} steps, {len(program.kernels)} kernels; plan {program.memory / 2**20:.1f} MiB",
    ]
    for line, _, different, worst, _ in figures:
        n_equal = len(scenes) - different
        report.append(f"  {line}; {n_equal} of {len(scenes)} equal in bits, error {worst:.2g} of the RMS")
    equal = sum(": ok" in line for line in lines)
    kind = "equal in bits" if own.exact else "within the tolerance"
    report.append(f"  C program: status {status}, {equal} of {n_recorded} {kind}, first result after {first:.3f} s")
    if status:
        report.append("  " + next((line for line in lines if ": ok" not in line), "nothing was said").strip())
    theirs = of_spconv.get(f"{name}:{dtype}".replace("torch.", ""), {})
    if "error" in theirs:
        report.append(f"  spconv: {theirs['error']}")
    (wall, worked), (as_graph, _) = figures[0][1], figures[1][1]
    cells = [statistics.median(theirs["ms"]) if "ms" in theirs else None, statistics.median(python)]
    cells += [wall, as_graph, worked]
    numbers = [f"{cell:.3f}" if cell is not None else "-" for cell in cells]
    row = [name, str(dtype).removeprefix("torch."), *numbers, f"{wall / worked:.2f}, {as_graph / worked:.2f}"]
    report += [f"  the test took {time.perf_counter() - begin:.0f} s", "| " + " | ".join(row) + " |"]
    printed("\n".join(report), capsys)
    for _, _, different, worst, taken in figures:
        assert worst <= tolerances.of("network", dtype).rms
        assert different == 0 or not own.exact, f"{different} of {len(scenes)} scenes differ, by {worst:.2g} of the RMS"
        if alone():
            assert taken <= program.memory
    assert status == 0 and sum(": ok" in line for line in lines) == n_recorded
    if "rms" in theirs:  # the same network, weights included
        assert theirs["rms"] == pytest.approx(upstream.sizes_of(outputs[0]), rel=0.02)
