"""Ratios, verdicts, and records old and new."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.results import Comparison, Figure, Run, load_run, merge
from sparse_bridge.errors import ShapeError

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"


def figure(peer, rounds=(), case="layers/s/c16/fp16/forward", **more):
    suite, scene, subject, dtype, work = case.split("/")
    made = Figure(case, peer, suite, scene, subject, dtype, work, work, **more)
    made.add([[one] for one in rounds])
    return made


def test_ratios_pair_the_rounds():
    # Both peers slow down threefold in the second half: the ratio does not see it.
    one = Comparison(figure("a", [1, 1, 3, 3]), [figure("b", [0.5, 0.5, 1.5, 1.5])])
    ratio = one.ratio(one.others[0])
    assert (ratio.low, ratio.median, ratio.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("rounds", "verdict"), [([0.8, 0.9, 0.9], "faster"), ([1.1, 1.2, 1.3], "slower"), ([0.8, 1.0, 1.3], "even")]
)
def test_verdict(rounds, verdict):
    one = Comparison(figure("a", [1, 1, 1]), [figure("b", rounds)])
    assert one.ratio(one.others[0]).verdict == verdict


def test_no_ratio_without_both_times():
    one = Comparison(figure("a", error="broken"), [figure("b", [1.0])])
    assert one.ratio(one.others[0]) is None and one.memory(one.others[0]) is None


@pytest.mark.parametrize(
    ("check", "differs"),
    [
        ({"api": "spconv", "rows": 7, "rms": 1.001}, False),
        ({"api": "spconv", "rows": 7, "rms": 1.2}, True),
        ({"api": "spconv", "rows": 8, "rms": 1.0}, True),
        ({"api": "spconv", "rows": 7, "rms": None}, True),
        ({"api": "torchsparse", "rows": 8, "rms": 5.0}, False),
    ],
)
def test_results_that_differ_are_noticed(check, differs):
    base = figure("a", [1.0], check={"api": "spconv", "rows": 7, "rms": 1.0})
    other = figure("b", [1.0], check=check)
    assert Comparison(base, [other]).disagrees(other) is differs


def test_a_record_comes_back_as_it_was(tmp_path):
    run = Run(["a", "b"], [figure("a", [1, 2]), figure("b", [3, 4], peak_mb=7.0)], {"cpu": "x"})
    run.save(tmp_path / "new" / "run.json")
    assert load_run(tmp_path / "new" / "run.json") == run
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "run.json"]


@pytest.mark.parametrize("content", ["{}", "[]", '{"schema": 2}', "no json", '{"rows": [{}]}'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ShapeError, match="expected the file that"):
        load_run(tmp_path / "x.json")


def test_earlier_gpu_records_are_read():
    run = load_run(RECORDS / "h200_fp16.json")
    rows = json.loads((RECORDS / "h200_fp16.json").read_text())["rows"]
    assert run.peers == ["spconv", "bridge"] and len(run.figures) == len(rows)
    cases = {one.base.case: one for one in run.comparisons()}
    one = cases["layers/semantickitti_64beam_005cm/c64/fp16/forward"]
    assert one.base.rows == 94_444 and one.base.channels == 64
    assert one.ratio(one.others[0]).median == pytest.approx(0.41, abs=0.005)
    unet = cases["networks/semantickitti_64beam_005cm_x4/unet/fp16/step"]
    assert unet.memory(unet.others[0]) == pytest.approx(0.96, abs=0.005)
    assert {one.base.suite for one in cases.values()} == {"layers", "shells", "networks"}


def test_earlier_cpu_records_are_read_with_their_ratios_turned_round():
    run = load_run(RECORDS / "cpu_nuscenes.json")
    row = json.loads((RECORDS / "cpu_nuscenes.json").read_text())["rows"][0]
    one = run.comparisons()[0]
    ratio = one.ratio(one.others[0])
    assert one.base.rows == 17_885 and one.base.subject == "second-t1"
    assert ratio.median == pytest.approx(1 / row["ratio"])
    assert ratio.low == pytest.approx(1 / row["high"]) and ratio.low < ratio.median < ratio.high


def test_runs_merge():
    half, single = (load_run(RECORDS / f"h200_{name}.json") for name in ("fp16", "fp32"))
    merged = merge([half, single])
    assert len(merged.figures) == len(half.figures) + len(single.figures)
    assert merged.peers == half.peers and merged.machine == half.machine
    assert len(half.figures) == len(load_run(RECORDS / "h200_fp16.json").figures)
    assert dataclasses.replace(half) == half
