"""Turns, budgets and failures, with workers that only pretend; then a real run on the CPU."""

import json

import pytest

from benchmarks import runner
from benchmarks.cli import skipped_note
from benchmarks.processes import WorkerError, empty_caches
from benchmarks.registry import Selection, enumerate_cases
from benchmarks.results import Run, load_run
from benchmarks.runner import Limits, Runner
from sparse_bridge.__main__ import main

LIMITS = Limits(rounds=4, seconds=0.01, budget=30, answer=5)


class FakeWorker:
    """Answers at once; `log` holds who was asked what, `fails` raises for (peer, op)."""

    log: list
    fails: dict
    started: list

    def __init__(self, peer, environment=None):
        self.peer, self.closed = peer, False
        self.started.append((peer, environment))

    def ask(self, op, timeout, **arguments):
        assert not self.closed
        self.log.append((self.peer, op))
        error = self.fails.get((self.peer, op))
        if error is not None:
            raise error
        scale = 2.0 if self.peer == "a" else 1.0
        return {
            "hello": {"versions": {"torch": "0"}},
            "open": {"rows": 10, "first_s": scale, "pairs": 30},
            "round": {"ms": [scale, scale]},
            "memory": {"peak_mb": 1.0, "total_mb": 2.0, "held_mb": 0.5},
            "probe": {"matrix": 1e9, "copy": 1e9},
            "close": {},
        }[op]

    def close(self):
        self.closed = True


@pytest.fixture
def workers(monkeypatch):
    FakeWorker.log, FakeWorker.fails, FakeWorker.started = [], {}, []
    monkeypatch.setattr(runner, "Worker", FakeWorker)
    return FakeWorker


def cases(*patterns, suite="layers"):
    wanted = Selection((suite,), ("sheet:10",), ("fp32",), "cpu", patterns=patterns)
    return enumerate_cases(wanted)


def measured(chosen, limits=LIMITS):
    run = Run(["a", "b"])
    Runner(run, limits).measure(chosen)
    return run


def test_peers_take_turns_and_the_order_alternates(workers):
    run = measured(cases("*/c16/*/forward"))
    asked = [peer for peer, op in workers.log if op == "round"]
    assert asked == list("abbaabba")
    first, second = run.figures[:2]
    assert first.rounds == [2.0] * 4 and second.samples == 8
    assert run.comparisons()[0].ratio(second).median == 0.5
    # 2 * 30 pairs * 16 * 16 flops at 1 GFLOP/s; 2,360 bytes at 1 GB/s take less
    assert first.floor_ms == pytest.approx(0.01536) and first.pairs == second.pairs == 30


def test_pairs_are_counted_once_and_rates_probed_once(workers):
    measured(cases("*/c16/*", "*/c32/*"))
    assert workers.log.count(("a", "probe")) == 1 and ("b", "probe") not in workers.log
    assert [peer for peer, _ in workers.started] == ["a", "b"]


def test_a_peer_that_cannot_start_is_dropped_and_named(workers):
    workers.fails["a", "hello"] = WorkerError("ImportError: no a")
    run = measured(cases("*/c16/*"))
    assert [peer for peer, _ in workers.started] == ["a", "b"]
    assert run.notes == ["a does not start: ImportError: no a"]
    assert all(one.error for one in run.figures if one.peer == "a")
    assert all(one.ms == 1.0 and one.pairs == 30 for one in run.figures if one.peer == "b")


@pytest.mark.parametrize(("usable", "starts"), [(False, 3), (True, 2)])
def test_a_failure_stays_with_its_case(workers, usable, starts):
    workers.fails["b", "round"] = WorkerError("CUDA error", usable=usable)
    run = measured(cases("*/c16/*/f*"))
    assert len(run.figures) == 4
    assert [one.error for one in run.figures if one.peer == "b"] == ["CUDA error"] * 2
    assert all(one.ms == 2.0 for one in run.figures if one.peer == "a")
    # The last failure's replacement is never needed.
    assert len(workers.started) == starts


def test_what_the_budget_does_not_cover_is_listed(workers):
    run = measured(cases("*/c16/*"), Limits(budget=0.0))
    assert run.figures and not workers.log
    assert {one.error for one in run.figures} == {"skipped: no time left"}
    (note,) = skipped_note(run, Limits(budget=7.0))
    assert note.startswith("3 of 3 cases were skipped after 7 s") and "--time-budget" in note
    assert skipped_note(measured(cases("*/c16/*")), Limits()) == []


def test_cold_cases_start_new_processes_and_fill_one_cache(workers):
    run = measured(cases("*/cold-infer", suite="cold"))
    assert len(workers.started) == 8  # 2 repeats x 2 peers x (empty, filled)
    folders = [environment["TRITON_CACHE_DIR"] for _, environment in workers.started]
    assert folders[0] == folders[1] and len(set(folders)) == 4
    labels = [(one.peer, one.label, one.ms) for one in run.figures]
    assert labels == [
        ("a", "first inference, empty caches", 2000.0),
        ("b", "first inference, empty caches", 1000.0),
        ("a", "first inference, second process", 2000.0),
        ("b", "first inference, second process", 1000.0),
    ]


def test_memory_cases_are_not_timed(workers):
    run = measured(cases("*/second/*/infer", suite="memory"))
    assert ("a", "round") not in workers.log
    assert {one.memory_mb for one in run.figures} == {1.5} and run.figures[0].ms is None


def test_empty_caches_are_empty_and_inside_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_BRIDGE_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    environment = empty_caches(tmp_path)
    assert "/elsewhere" not in environment.values()
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        assert environment[name].startswith(str(tmp_path))


@pytest.mark.slow
def test_a_real_run_writes_json_markdown_and_pictures(tmp_path, capsys):
    out = tmp_path / "run.json"
    command = ["bench", "--suite", "layers", "networks", "--dtype", "fp16", "--device", "cpu"]
    command += ["--scans", "sheet:60", "--rounds", "2", "--seconds", "0.01"]
    command += ["--peers", "bridge", "bridge_torchsparse", "flexgemm"]
    command += ["--case", "layers/*/c16/*/f*", "networks/sheet_60/second/fp16/infer"]
    command += ["--json", str(out), "--markdown", str(tmp_path / "run.md")]
    assert main([*command, "--plots", str(tmp_path / "plots")]) == 0
    run = load_run(out)
    found = {(one.work, one.peer): one for one in run.figures}
    assert len(found) == len(run.figures) == 9
    for work in ("forward", "fresh"):
        for peer in ("bridge", "bridge_torchsparse"):
            one = found[work, peer]
            assert one.error is None and one.ms > 0 and one.rows == 60 and one.floor_ms > 0
            assert len(one.rounds) == 2 and one.check["rows"] == 60 and one.check["rms"] > 0
    assert found["infer", "bridge"].ms > 0
    assert "no second in the API" in found["infer", "bridge_torchsparse"].error
    assert "does not start" in found["forward", "flexgemm"].error
    assert run.rates["fp16"]["copy"] > 0 and run.versions["bridge"]["torch"]
    text = (tmp_path / "run.md").read_text()
    assert "c16, sheet_60" in text and "plots/layers-ratios" in text
    assert (tmp_path / "plots" / "layers-floor.png").stat().st_size > 5000
    assert json.loads(out.read_text())["schema"] == 2
    assert "[1/3] layers/sheet_60/c16/fp16/forward" in capsys.readouterr().err


def test_options_that_do_not_fit_are_refused(tmp_path, capsys):
    assert main(["bench", "--scans", str(tmp_path / "missing.npz")]) == 2
    assert main(["bench", "--rounds", "0"]) == 2
    assert main(["bench", "--suite", "all", "--device", "cpu", "--list"]) == 0
    captured = capsys.readouterr()
    assert "no such file" in captured.err and "--rounds 0" in captured.err
    assert "scale/sheet_8000000/c320/fp32/train" in captured.out.splitlines()


def test_results_that_cannot_be_written_are_refused_first(tmp_path, capsys):
    (tmp_path / "file").touch()
    for option in ("--json", "--markdown"):
        assert main(["bench", option, str(tmp_path / "file" / "out")]) == 2
        assert f"{option} {tmp_path}" in capsys.readouterr().err.replace("\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_options_a_cpu_gets_what_it_gets_through(capsys):
    def listed(*options):
        assert main(["bench", "--device", "cpu", "--list", *options]) == 0
        return capsys.readouterr().out.split()

    few = listed()
    assert {name.split("/")[1] for name in few} == {"street_0.2"}
    assert {name.split("/")[0] for name in few} == {"layers", "networks"} and len(few) <= 12
    assert set(few) < set(listed("--suite", "layers", "networks", "--scans", "street:0.2"))
    assert listed("--case", "layers/*/c256/*")  # what is asked for is not narrowed
