"""Records of one process and of several: what their tables say, and one made on this CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.scale_out import __main__ as program
from benchmarks.scale_out import launch, tables
from benchmarks.scale_out.training import batch_of, labelled_scenes


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


def test_curves_are_compared_with_one_rank() -> None:
    def row(ranks: int, backwards: bool, losses: list[float]) -> dict:
        return {"ranks": ranks, "backwards": backwards, "losses": {"bridge": losses}}

    steps = [2.0] * 20 + [1.0]
    rows = [row(1, False, steps), row(1, True, steps), row(2, False, [2.0] * 20 + [1.5])]
    assert cells(tables.table("curves", rows)) == [
        ["bridge", "1 rank", "", "", "", "1.00000"],
        ["bridge", "1 rank, opposite order", "0.0e+00", "0.0e+00", "0.0e+00", "1.00000"],
        ["bridge", "2 ranks", "0.0e+00", "5.0e-01", "2.4e-02", "1.50000"],
    ]


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
    assert "exit status 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_record_of_this_cpu(tmp_path) -> None:
    path = tmp_path / "record.json"
    options = ["--quick", "--device", "cpu", "--peers", "bridge", "--json", str(path)]
    assert program.main(options) == 0
    parts = json.loads(path.read_text())["parts"]
    assert [row["ranks"] for row in parts["throughput"]] == [1, 2]
    assert len(parts["first_step"]) == 4 and len(parts["curves"]) == 3
    alone, backwards, _ = (row["losses"] for row in parts["curves"])
    for name, losses in alone.items():
        assert losses[1] < losses[0] and backwards[name] == pytest.approx(losses, rel=1e-4)
    saved, loaded = (row["of_ranks"][0] for row in parts["checkpoint"])
    assert saved["weights"] == loaded["weights"] and saved["loss"] == loaded["loss"]
