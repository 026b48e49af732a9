"""`warm` and `cache`: what they run, store, show and delete."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from sparse_bridge import __main__ as command_line
from sparse_bridge import settings
from sparse_bridge.commands import cache, warm, warm_jobs, warm_options
from sparse_bridge.core.device import trace
from sparse_bridge.core.tuning import tune_cache
from sparse_bridge.core.tuning.kernel_hash import kernel_hash
from sparse_bridge.core.tuning.tune_cache import Stamp, TuneCache, decode, encode
from sparse_bridge.errors import DeviceError, GeometryError, SettingError
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.native import build
from tests.patience import PATIENCE
from tests.releases import triton_since

CPU = torch.device("cpu")
ROOT = pathlib.Path(__file__).parents[2]
no_kernels = pytest.mark.skipif(
    torch.cuda.is_available() or targets.unavailable(CPU) is None, reason="kernels run here"
)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A folder with a current, an older and a damaged file, and two shipped winners."""
    pytest.importorskip("triton")
    from sparse_bridge.kernels.tiles.tile import TileConfig

    winner = tune_cache.Winner(TileConfig(64, 32, 16, 4, 2), 12.5, 20.0, 5)
    version = ".".join(map(str, targets.triton_version()))
    stamp = Stamp(kernel_hash(), version, "NVIDIA H200", "sm_90", 132)
    place = tmp_path / "cache"
    TuneCache(place, stamp).store("fwd", "bucket-a", winner)
    TuneCache(place, stamp).store("wgrad", "bucket-b", winner)
    old = dataclasses.replace(stamp, kernels="0" * 16, device="AMD Instinct MI300X", arch="gfx942")
    TuneCache(place, old).store("dgrad", "bucket-c", winner)
    (place / "broken.json").write_text("{")
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "sm_90.json").write_text(encode(stamp, {"fwd": {"bucket-d": winner}}))
    for module in (tune_cache, cache):
        monkeypatch.setattr(module, "shipped_folder", lambda: tuned)
    monkeypatch.setenv("COLUMNS", "220")
    with settings.override(cache_dir=place):
        yield place, stamp


def files_of(place):
    return sorted(path.name for path in place.iterdir() if path.is_file())


def test_cache_show_as_json(stored, capsys):
    place, stamp = stored
    assert command_line.main(["cache", "show", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == str(place) and facts["kernels"] == stamp.kernels
    by_device = {one.get("device"): one for one in facts["stored"]}
    h200, amd, broken = by_device["NVIDIA H200"], by_device["AMD Instinct MI300X"], by_device[None]
    assert h200["current"] and not amd["current"] and "JSONDecodeError" in broken["problem"]
    assert h200["winners"]["fwd"]["bucket-a"]["tile"]["block_n"] == 32
    assert set(h200["winners"]) == {"fwd", "wgrad"} and set(amd["winners"]) == {"dgrad"}
    assert h200["bytes"] == (place / stamp.file_name).stat().st_size
    (shipped,) = facts["shipped"]
    assert shipped["file"] == "sm_90.json" and set(shipped["winners"]["fwd"]) == {"bucket-d"}


def test_cache_show_as_tables(stored, capsys):
    place, _ = stored
    assert command_line.main(["cache", "show"]) == 0
    shown = capsys.readouterr().out
    for words in (str(place), "NVIDIA H200 (sm_90)", "other kernels made it", "unusable", "132"):
        assert words in shown
    assert "bucket-a" not in shown and "…" not in shown
    assert command_line.main(["cache", "show", "--buckets"]) == 0
    shown = capsys.readouterr().out
    for words in ("bucket-a", "bucket-b", "bucket-c", "bucket-d", "block_n=32", "12.5", "20.0"):
        assert words in shown
    with settings.override(cache_dir=place / "empty"):
        assert command_line.main(["cache", "show"]) == 0
    assert "Stored: nothing" in capsys.readouterr().out


def test_why_a_winner_is_not_read(stored, fake_gpu):
    """Kernels that are the same and a Triton that is another, or none: each has its own words."""
    _, stamp = stored
    old = dataclasses.replace(stamp, triton="3.1.0")
    assert cache.unread(stamp) is None
    assert cache.unread(old) == "not read: made for Triton 3.1.0"
    assert "other kernels" in cache.unread(dataclasses.replace(stamp, kernels="0" * 16))
    assert cache.unread(dataclasses.replace(old, kernels="0" * 16), shipped=True) is None
    fake_gpu.has(triton=None)
    assert "layers on a CPU need none" in cache.unread(stamp)
    assert "layers on a CPU need none" in cache.unread(stamp, shipped=True)


def test_shipped_winners_are_read_whatever_kernels_and_triton_made_them(monkeypatch, tmp_path, capsys):
    """The real files: `cache show` says of each what the tuner does with it."""
    pytest.importorskip("triton")
    from sparse_bridge.core.tuning.tuner import DeviceTiles

    monkeypatch.setenv("COLUMNS", "220")
    with settings.override(cache_dir=tmp_path):
        shipped = cache.collect()["shipped"]
        assert command_line.main(["cache", "show"]) == 0
    shown = capsys.readouterr().out
    assert [file["file"] for file in shipped] == ["nvidia-h200.json"]
    for file in shipped:
        stamp = Stamp(kernel_hash(), cache.installed_triton(), file["device"], file["arch"], file["compute_units"])
        (source,) = DeviceTiles("pinned", "", stamp, False).sources
        count = sum(map(len, source.values()))
        assert count == sum(map(len, file["winners"].values())) > 100
        assert file["current"] and file["unread"] is None
        (row,) = (line for line in shown.splitlines() if file["file"] in line)
        assert str(count) in row and "not read" not in row
        if (file["kernels"], file["triton"]) != (stamp.kernels, stamp.triton):
            assert "read; tuned with" in row
        elsewhere = dataclasses.replace(stamp, device="NVIDIA T4", arch="sm_75")
        assert DeviceTiles("pinned", "", elsewhere, False).sources == []


def test_shipped_winners_name_buckets_as_the_tuner_does():
    from sparse_bridge.core.tuning.problem import Bucket

    files = [
        cache.decode(path.read_text()) for path in tune_cache.shipped_folder().iterdir() if path.name[-5:] == ".json"
    ]
    names = {(direction, name) for _, winners, _ in files for direction, found in winners.items() for name in found}
    assert len(names) > 100
    for direction, name in names:
        dataflow, dtype, precision, order, channels, groups, *rest = name.split("/")
        c_in, c_out = map(int, channels[1:].split("x"))
        numbers = [int(part[1:]) for part in (groups, *rest)]
        bucket = Bucket(direction, dataflow, getattr(torch, dtype), precision, order, c_in, c_out, *numbers)
        assert str(bucket) == name


def test_cache_clear(stored, capsys):
    place, stamp = stored
    (place / "mine.txt").write_text("not ours")
    assert command_line.main(["cache", "clear", "--stale"]) == 0
    assert files_of(place) == ["mine.txt", stamp.file_name]
    assert "2 files deleted" in capsys.readouterr().out
    assert command_line.main(["cache", "clear", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"] == [stamp.file_name] and facts["bytes"] > 0
    assert files_of(place) == ["mine.txt"]
    assert not list((place / "locks").iterdir())
    assert command_line.main(["cache", "clear"]) == 0
    assert "0 files deleted" in capsys.readouterr().out
    with settings.override(cache_dir=place / "never-made"):
        assert command_line.main(["cache", "clear"]) == 0


def test_libraries_of_the_helper_are_cleared(stored):
    """Stale ones are of another source or another Python."""
    folder = stored[0] / "native"
    folder.mkdir()
    (folder / "mine.so").touch()
    name = f"{build.NAME}-{build.digest()}"
    for library in (f"{name}-0123.cpython.so", f"{name[:-1]}x-0123.cpython.so"):
        (folder / library).write_bytes(b"x")
    assert [current for _, current in build.stored()].count(True) == 1
    assert command_line.main(["cache", "clear", "--stale"]) == 0
    assert files_of(folder) == ["mine.so", f"{name}-0123.cpython.so"]
    assert command_line.main(["cache", "clear"]) == 0
    assert files_of(folder) == ["mine.so"]


def test_clearing_leaves_the_locks_of_others(stored):
    place, stamp = stored
    with TuneCache(place, stamp).claim("fwd", "x", 1.0) as mine:
        assert mine and command_line.main(["cache", "clear"]) == 0
        assert len(list((place / "locks").iterdir())) == 1


@no_kernels
def test_warm_without_a_gpu_says_so(capsys):
    assert command_line.main(["warm", "--channels", "16"]) == 2
    refusal = capsys.readouterr().err
    assert "torch finds no CUDA or ROCm device" in refusal and "need no warming" in refusal
    assert command_line.main(["warm", "--device", "cuda"]) == 2
    assert "--device cuda" in capsys.readouterr().err


def options(*words):
    parser = argparse.ArgumentParser()
    warm_options.add_parser(parser.add_subparsers())
    return parser.parse_args(["warm", *words])


def test_what_warm_runs():
    assert [job.model for job in warm.jobs_of(options())] == ["second", "unet"]
    assert len(warm.jobs_of(options("--models", "unet", "--dtypes", "fp16", "fp32"))) == 2
    jobs = warm.jobs_of(options("--channels", "16", "32", "--layouts", "vio", "--rows", "7", "9"))
    layers = {(job.layer_type, job.c_in, job.c_out, job.kernel) for job in jobs}
    assert layers == {
        ("submanifold", 16, 16, 3),
        ("submanifold", 32, 32, 3),
        *((kind, c, c, k) for kind in ("strided", "inverse") for c in (16, 32) for k in (3, 2)),
        *(("strided", 16, 32, k) for k in (3, 2)),
        *(("inverse", 32, 16, k) for k in (3, 2)),
    }
    assert len(jobs) == len(layers) and all(job.rows == (7, 9) and job.train for job in jobs)
    assert not any(job.train for job in warm.jobs_of(options("--inference")))
    assert len({str(job) for job in jobs}) == len(jobs)


def test_layers_take_every_turn():
    """On the CPU in plain torch: the same calls as on a GPU."""
    for job in warm_jobs.layer_jobs([4, 8], [3, 2], ["fp32", "bf16"], ["ovi", "vio"], [60], True):
        with trace.record() as events:
            job.run(CPU)
        assert len(events) == 7, "inference with every end of a layer, two steps"
        assert {(e.c_in, e.c_out, e.n_offsets) for e in events} == {(job.c_in, job.c_out, job.kernel**3)}
        rows = {"submanifold": {60}, "strided": {events[0].n_in}, "inverse": {events[0].n_out}}
        assert rows[job.layer_type] == {60}
    with trace.record() as events:
        dataclasses.replace(job, train=False).run(CPU)
    assert len(events) == 5


@pytest.mark.parametrize("train", [False, True])
def test_a_network_runs_forward_and_backward(train):
    with trace.record() as events:
        warm_jobs.ModelJob("second", "fp32", (300, 200), train).run(CPU)
    assert [e.n_in for e in events if e.c_in == 4] == [300] * (1 + train) + [200] * (1 + train)


WARM = """
import argparse, dataclasses, functools, itertools, sys, warnings
warnings.simplefilter("ignore")
from sparse_bridge.commands import warm, warm_options
interpreter = warm.targets.of
# Programs of the interpreter run one after another, and each takes a while.
warm.targets.of = lambda device: dataclasses.replace(interpreter(device), compute_units=1)
every = warm.jobs_of
warm.jobs_of = lambda args: every(args)[:1]
warm.tuners.Tuner = functools.partial(warm.tuners.Tuner, count=2)
order = itertools.count()

def timer(run, limit):  # every tile is faster than the one before
    run()
    return 1e-3 * 0.5 ** next(order)

parser = argparse.ArgumentParser()
warm_options.add_parser(parser.add_subparsers())
raise SystemExit(warm.run(parser.parse_args(["warm", *sys.argv[1:]]), timer))
"""


def interpreted(place, *words):
    """`warm` where kernels run in Triton's interpreter."""
    return subprocess.run(
        [sys.executable, "-c", WARM, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE,
        env={**os.environ, "TRITON_INTERPRET": "1", "SPARSE_BRIDGE_CACHE_DIR": str(place), "COLUMNS": "250"},
    )


@pytest.mark.slow
@triton_since(3, 4, "the interpreter counts in too few bits")
def test_warm_tunes_stores_and_exports(tmp_path):
    """One layer, forward and backward, through the real kernels in the interpreter."""
    pytest.importorskip("triton")
    layer = ["--channels", "16", "--kernels", "2", "--dtypes", "fp32", "--layouts", "vio"]
    how = ["--rows", "30", "--jobs", "1", "--tune", "--budget", "100"]
    export = tmp_path / "mine.json"
    done = interpreted(tmp_path, *layer, *how, "--export", export, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    stamp, winners, _ = decode(export.read_text())
    assert (stamp.device, stamp.arch) == ("interpreter", "interpreter")
    assert {direction: len(found) for direction, found in winners.items()} == {"fwd": 1, "dgrad": 1, "wgrad": 1}, (
        done.stdout
    )
    for found in winners.values():
        for bucket, winner in found.items():
            assert "/float32/ieee/" in bucket and "/c16x16/g1/v8/" in bucket
            assert winner.microseconds <= winner.default_microseconds
    assert any(one.tested > 1 for found in winners.values() for one in found.values())
    assert f"3 tuned tiles and dataflows in {export}" in done.stderr and "compiled in" in done.stderr
    assert [line for line in done.stderr.splitlines() if "wgrad" in line and "pairs" in line]
    facts = json.loads(done.stdout)
    assert facts["exported"] == 3 and len(facts["jobs"]) == 1 and facts["seconds"] > 0
    assert {one["direction"] for one in facts["tuned"]} == {"fwd", "dgrad", "wgrad"}
    assert all(one["winner"]["tile"]["block_m"] for one in facts["tuned"])
    with settings.override(cache_dir=tmp_path):
        assert TuneCache(tmp_path, stamp).load() == winners


def test_warm_tunes_groups_of_networks(fake_gpu, monkeypatch, tmp_path, capsys):
    """Of what networks run, not of layers alone; winners are shown and exported."""
    pytest.importorskip("triton")
    from tests.core.test_groups import group

    watched = []

    @contextlib.contextmanager
    def tuned():
        yield
        watched.append("tuned")
        found = warm.tuners.current()
        found.groups.append(group())
        TuneCache(tmp_path, Stamp.of(CPU, target)).store_group(group())

    target = targets.Target("interpreter", "interpreter", 32, 4, 1 << 20, raw=False)
    fake_gpu.has(target=target)
    monkeypatch.setattr(warm.group_race, "tuned", tuned)
    for kind in (warm_jobs.LayerJob, warm_jobs.ModelJob):
        monkeypatch.setattr(kind, "run", lambda job, device: watched.append(str(job)))
    monkeypatch.setattr(warm, "device_of", lambda wanted: CPU)
    monkeypatch.setenv("COLUMNS", "400")
    export = tmp_path / "mine.json"
    words = ["--models", "second", "--channels", "16", "--kernels", "2", "--jobs", "1", "--json"]
    arguments = options(*words, "--tune", "--layouts", "vio", "--export", str(export))
    with settings.override(cache_dir=tmp_path):
        assert warm.run(arguments, lambda run, limit: 1.0) == 0
        facts = cache.collect()
    jobs = len(warm.jobs_of(arguments))
    assert watched.count("tuned") == 1 and len(watched) == 2 * jobs + 1
    assert watched[watched.index("tuned") - 1] == "second, fp16"
    out, err = capsys.readouterr()
    assert json.loads(out)["groups"] == [dataclasses.asdict(group())] and str(group()) in err
    assert decode(export.read_text())[2] == {group().key: group()}
    assert facts["stored"][0]["groups"] == {group().key: dataclasses.asdict(group())}
    arguments = argparse.Namespace(json=False, buckets=True)
    with settings.override(cache_dir=tmp_path):
        assert cache.run_show(arguments) == 0
    assert "unmasked for fwd0:64x64/g1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_warm_in_several_processes(monkeypatch):
    """Jobs reach other processes, and what stops one of them comes back."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(ROOT)
    setup = warm.Setup(CPU, tune=False)
    jobs = [warm_jobs.LayerJob("strided", 4, 4, kernel, "fp32", "vio", (8,), False) for kernel in (1, -1)]
    with pytest.raises(GeometryError, match="-1"):
        warm.compile_all(jobs, setup, 2, Console(quiet=True))


@dataclasses.dataclass(frozen=True)
class Large:
    """A job that fits into memory only alone."""

    told: str
    parent: int

    def run(self, device):
        if os.getpid() != self.parent:
            raise torch.OutOfMemoryError("beside the others")
        pathlib.Path(self.told).write_text("ran alone")


@pytest.mark.slow
def test_warm_jobs_that_need_the_memory_for_themselves(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(ROOT)
    told = tmp_path / "told"
    job = Large(str(told), os.getpid())
    warm.compile_all([job], warm.Setup(CPU, tune=False), 2, Console(quiet=True))
    assert told.read_text() == "ran alone"


def test_warm_refuses_to_time_where_time_means_nothing(fake_gpu, monkeypatch):
    monkeypatch.setattr(warm, "device_of", lambda wanted: CPU)
    monkeypatch.setattr(warm, "compile_all", lambda *arguments: None)
    interpreter = targets.Target("interpreter", "interpreter", 32, 4, 1 << 20, raw=False)
    fake_gpu.has(target=interpreter)
    with pytest.raises(DeviceError, match="cannot be timed"):
        warm.run(options("--tune"))
    with pytest.raises(SettingError, match="--export"):
        warm_options.run(options("--export", "/nonexistent/folder/mine.json"))


def test_help_of_the_commands(capsys):
    for words in (["warm"], ["cache"], ["cache", "show"], ["cache", "clear"]):
        with pytest.raises(SystemExit) as left:
            command_line.main([*words, "--help"])
        assert left.value.code == 0 and "usage: " in capsys.readouterr().out
    assert cache.collect()["folder"]


def test_an_installed_wheel_lists_only_what_it_has(monkeypatch, capsys, tmp_path):
    from sparse_bridge import __main__ as command_line

    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    assert "bench" in capsys.readouterr().out
    monkeypatch.setattr(command_line, "__file__", str(tmp_path / "sparse_bridge/__main__.py"))
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    shown = capsys.readouterr().out
    assert "bench" not in shown and "compat" not in shown and "doctor" in shown


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    from sparse_bridge import __main__ as command_line

    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run_doctor", interrupt)
    assert command_line.main(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "sparse_bridge: interrupted"
