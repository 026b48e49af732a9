"""Records of one process and of several: what their tables say, and one made on this CPU."""

from __future__ import annotations

import json
import math
import subprocess

import pytest

from benchmarks.scale_out import __main__ as program
from benchmarks.scale_out import agreement, launch, tables
from benchmarks.scale_out.training import batch_of, labelled_scenes
from tests.patience import PATIENCE


def cells(text: str) -> list[list[str]]:
    """Of the lines below the header."""
    rows = [line.strip("|").split("|") for line in text.strip().splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def throughput(peer: str, ranks: int, *medians: float) -> dict:
    of_ranks = [{"samples_per_second": [1.0, m, 99.0], "balance": 0.9} for m in medians]
    return {"peer": peer, "ranks": ranks, "of_ranks": of_ranks}


def test_samples_a_second_are_the_slowest_ranks_median() -> None:
    rows = [
        throughput("bridge", 1, 40.0),
        throughput("bridge", 2, 78.0, 76.0),
        throughput("spconv", 2, 20.0, 19.0),
        {"peer": "spconv", "ranks": 1, "error": "no memory\nmore"},
    ]
    assert cells(tables.table("throughput", rows)) == [
        ["bridge", "1", "40.0", "1.00", "", "0.900"],
        ["bridge", "2", "76.0", "1.90", "4.00", "0.900"],
        ["spconv", "2", "19.0", "", "1.00", "0.900"],
    ]
    assert tables.line("throughput", rows[3]) == "throughput: no memory"
    assert tables.table("throughput", rows[3:]) == ""


def test_first_steps_are_the_last_ranks() -> None:
    def row(ranks: int, *ends: float) -> dict:
        found = [{"ready": end - 2.0, "steps": [end, end + 1], "compiled": 3} for end in ends]
        return {"ranks": ranks, "caches": "empty", "kernels": 6, "of_ranks": found}

    rows = [row(1, 10.0), row(2, 11.0, 12.0)]
    assert cells(tables.table("first_step", rows)) == [
        ["1", "empty", "10.0", "1.00", "2.0", "3", "6"],
        ["2", "empty", "12.0", "1.20", "2.0", "6", "6"],
    ]


def curves(joint: list[float], apart: list[float]) -> list[dict]:
    """Of one process, whose noise is 1e-4, and of two ranks."""

    def row(ranks: int, order: str, norms: str, losses: list[float]) -> dict:
        return {"ranks": ranks, "order": order, "norms": norms, "losses": {"bridge": losses}}

    return [
        row(1, "given", "joint", [2.0] * 30),
        row(1, "opposite", "joint", [2.0, *[2.0002] * 29]),
        row(2, "given", "joint", joint),
        row(2, "given", "apart", apart),
    ]


def test_curves_of_ranks_are_judged_by_the_noise_of_one_process() -> None:
    wrong, right = [2.5] * 20, [2.0, *[2.001] * 28, 2.0012]
    assert agreement.failures("curves", curves(right, wrong)) == []
    assert cells(tables.table("curves", curves(right, wrong))) == [
        ["bridge", "2 ranks, joint norms", "5.0e-04", "1.0e-04", "6.0e-04", "1.0e-04", "6.0e-01", "held"],
        ["bridge", "2 ranks, apart norms", *["2.5e-01", "1.0e-04"] * 2, "2.5e+05", "exceeded, as it must be"],
    ]
    for losses in ([2.00001, *right[1:]], [*right[:-1], 2.01]):  # before there is noise, and behind
        (text,) = agreement.failures("curves", curves(losses, wrong))
        assert "bridge, 2 ranks, joint norms: beyond" in text
    (text,) = agreement.failures("curves", curves(right, right))
    assert "apart norms: within" in text
    assert "not finite" in agreement.failures("curves", curves([math.nan, *right[1:]], wrong))[0]
    assert "needs runs" in agreement.failures("curves", curves(right, wrong)[:2])[0]


def test_checkpoints_are_compared_with_what_was_saved() -> None:
    facts = {"weights": "w", "momenta": "m", "loss": 1.0, "logits": "", "next": [1.0, 0.9]}

    def rows(**other: object) -> list[dict]:
        found = [facts, {**facts, "weights": None, "momenta": None}]
        save = {"part": "save", "peer": "bridge", "ranks": 2, "device": "cuda", "of_ranks": found}
        return [save, {**save, "part": "load", "ranks": 1, "device": "cpu", "of_ranks": [{**facts, **other}]}]

    assert agreement.failures("checkpoint", rows(loss=1.000001, next=[1.0001, 0.9])) == []
    for other in ({"weights": "v"}, {"momenta": "n"}, {"loss": 1.1}, {"next": [1.0, 0.8]}, {"loss": math.nan}):
        (text,) = agreement.failures("checkpoint", rows(**other))
        assert next(iter(other)) in text and "bridge, 1 ranks, cpu" in text
    assert "saved and loaded" in agreement.failures("checkpoint", rows()[:1])[0]


def test_scenes_of_a_batch() -> None:
    scenes = labelled_scenes(3, 1.6, azimuths=60)
    assert [len(classes) for _, classes in scenes] == [len(one.cells) for one, _ in scenes]
    scan, labels = batch_of(scenes[1:], "cpu")
    assert len(scan.coords) == len(scan.feats) == len(labels) and scan.batch_size == 2
    assert scan.coords[:, 0].unique().tolist() == [0, 1]
    assert all(edge % 32 == 0 for edge in scan.shape)
    assert (scan.coords[:, 1:].amax(0) < scan.coords.new_tensor(scan.shape)).all()


def test_a_part_that_fails_is_in_the_record(tmp_path, monkeypatch, capsys) -> None:
    def failing(part, ranks, options, environment=None, timeout=0.0):
        if part == "save":
            raise launch.LaunchError("save on 2 ranks: exit status 1")
        return [{"weights": "", "loss": 1.0, "logits": "", "next": [1.0]}]

    monkeypatch.setattr(program, "launch", failing)
    path = tmp_path / "record.json"
    options = ["--parts", "checkpoint", "--device", "cpu", "--peers", "bridge", "--json", str(path)]
    assert program.main(options) == 1
    (row,) = json.loads(path.read_text())["parts"]["checkpoint"]
    assert row == {"error": "save on 2 ranks: exit status 1"}
    assert json.loads(path.read_text())["disagreements"]["checkpoint"]
    assert "exit status 1" in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_left_out(monkeypatch, capsys) -> None:
    monkeypatch.setattr(program.peers, "installed", lambda name: name != "spconv")
    monkeypatch.setattr(program, "launch", lambda *_, **__: [throughput("", 1, 4.0)["of_ranks"][0]])
    assert program.main(["--parts", "throughput", "--ranks", "1", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "spconv cannot be imported" in printed.err and "| bridge | 1 | 4.0 |" in printed.out


@pytest.mark.slow
def test_a_launch_without_end_leaves_no_rank() -> None:
    """Which takes steps for hours."""
    options = {"device": "cpu", "peer": "bridge", "source": "sheet:500", "batch": 1, "dtype": "fp32"}
    sizes = {"rounds": 1, "steps": 10**5, "warm": 1}
    limit = PATIENCE / 40  # which no busy machine makes long enough
    with pytest.raises(launch.LaunchError, match=f"no end after {limit:.0f} s"):
        launch.launch("throughput", 2, {**options, **sizes, "local_statistics": False}, timeout=limit)
    left = subprocess.run(["pgrep", "-f", f"benchmarks.scale_out.rank throughput .*{10**5}"], stdout=subprocess.PIPE)
    assert not left.stdout


@pytest.mark.slow
def test_a_record_of_this_cpu(tmp_path) -> None:
    path = tmp_path / "record.json"
    options = ["--quick", "--device", "cpu", "--peers", "bridge", "--curve-peers", "bridge_torchsparse"]
    assert program.main([*options, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    parts = record["parts"]
    assert [row["ranks"] for row in parts["throughput"]] == [1, 2]
    assert len(parts["first_step"]) == 4 and len(parts["curves"]) == 5
    for losses in parts["curves"][0]["losses"].values():
        assert losses[1] < losses[0]
    assert [(row["part"], row["ranks"]) for row in parts["checkpoint"]] == [("save", 2), ("load", 1)]
    assert record["disagreements"] == {part: [] for part in parts}
