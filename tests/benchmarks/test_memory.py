"""The benchmark of memory limits, on a small level."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import memory
from tests.adapters.spconv.doors import without_wheel


@pytest.fixture(autouse=True)
def no_wheel():
    with without_wheel():
        yield


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """What is written here does not depend on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_quick_run(tmp_path, capsys, plain_settings):
    file = tmp_path / "memory.json"
    options = ["--quick", "--rounds", "1", "--blocks", "1", "--json", str(file)]
    assert memory.main(options) == 0
    found = json.loads(file.read_text())
    assert found["schema"] == memory.SCHEMA and found["device"] == "cpu"
    rows = found["rows"]
    assert {row["api"] for row in rows} == {"flex_gemm", "spconv"}
    assert {row["cut"] for row in rows} == {0, 256}
    assert len(rows) == 8 and all(row["same_bits"] and row["ms"] > 0 for row in rows)
    level = memory.QUICK["1k x 32"]
    operands = 2 * 4 * level.rows * level.channels / 2**20
    limits = [row["limit_mib"] for row in rows if row["limit_mib"] is not None]
    assert len(limits) == 4 and all(limit > operands for limit in limits)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(rows) and all(line.endswith("same") for line in printed[1:])


def test_other_bits_are_a_failure(monkeypatch, plain_settings):
    rows = [{"same_bits": True}, {"error": "least: 3 MiB"}, {"same_bits": False}]
    monkeypatch.setattr(memory, "compare", lambda *_: [rows.pop()])
    options = ["--quick", "--api", "spconv"]
    assert memory.main(options) == 1


@pytest.mark.parametrize("rows", (10, 3000))
def test_voxels_of_a_surface(rows):
    coords, extent = memory.surface(rows)
    assert coords.shape == (rows, 4) and coords.dtype == torch.int32
    assert len(coords.unique(dim=0)) == rows
    assert int(coords.min()) >= 0 and int(coords.max()) < extent
    assert torch.equal(coords, memory.surface(rows)[0])
