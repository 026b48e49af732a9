"""The benchmark of memory limits, on a small level."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import memory, memory_levels
from sparse_bridge import memory as limits
from sparse_bridge.errors import MemoryLimitError
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
    assert {row["mlp"] for row in rows} == {"whole", "cut", "none"}
    assert len(rows) == 12 and all(row["same_bits"] and row["ms"] > 0 for row in rows)
    level = memory.QUICK["1k x 32"]
    operands = 2 * 4 * level.rows * level.channels / 2**20
    limits = [row["limit_mib"] for row in rows if row["limit_mib"] is not None]
    assert len(limits) == 6 and all(limit > operands for limit in limits)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(rows) and all(line.endswith("same") for line in printed[1:])


GPU_ROW = {
    "level": "a",
    "api": "spconv",
    "mlp": "none",
    "limit_mib": 100.0,
    "allocated_mib": 130.5,
    "convolutions_mib": 99.0,
    "reserved_mib": 140.0,
    "ms": 1.0,
    "same_bits": True,
}


@pytest.mark.parametrize(
    ("allocated", "convolutions", "text"),
    [
        (100, 90, "kept"),
        (130, 100, "exceeded by 30.0 MiB, torch's layers"),
        (130, 120, "exceeded by 30.0 MiB, the bridge's layers"),
    ],
)
def test_whose_a_peak_was(allocated, convolutions, text):
    y = torch.ones(1)
    sizes = [size << 20 for size in (allocated, 200, convolutions)]
    row = memory.row_of(memory.Measured(1.0, y, *sizes), 100 << 20, y)
    assert memory.shown(GPU_ROW | row).endswith(f"same; {text}")


def test_caps_up_to_the_first_that_passes(monkeypatch):
    ends = {1.1: "OutOfMemoryError", 1.25: "passes", 1.5: "passes"}
    monkeypatch.setattr(memory, "run_capped", lambda run, limit, cap: ends[cap])
    found = memory.capped(None, 100, memory.CAPS)
    assert found == {"1.1": "OutOfMemoryError", "1.25": "passes"}
    line = memory.shown(GPU_ROW | {"capped": found})
    assert line.endswith("same; cap 1.1: OutOfMemoryError; cap 1.25: passes")


@pytest.mark.parametrize("error", (None, torch.OutOfMemoryError, MemoryLimitError))
def test_how_a_run_under_a_cap_ends(error, monkeypatch):
    """The process has its whole GPU again behind it."""
    shares, device = [], type("Device", (), {"total_memory": 1000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)

    def run():
        assert limits.limit == 100
        if error is not None:
            raise error("no room")

    assert memory.run_capped(run, 100, 1.5) == ("passes" if error is None else error.__name__)
    assert shares == [0.15, 1.0]


def test_the_peak_of_convolutions_alone(monkeypatch, plain_settings):
    """Between them the allocator may have had more."""
    peaks = iter((5, 9, 7))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    level = memory.QUICK["1k x 32"]
    scene = memory_levels.surface(level.rows)
    kinds = "none", 256, "cpu", torch.float32, 3
    with memory_levels.network_of("flex_gemm", level, scene, *kinds) as network:
        want = network()
        assert network.peak_of_convolutions() == 9
        assert torch.equal(network(), want), "it is not watched any longer"


def test_other_bits_are_a_failure(monkeypatch, plain_settings):
    rows = [{"same_bits": True}, {"error": "least: 3 MiB"}, {"same_bits": False}]
    monkeypatch.setattr(memory, "compare", lambda *_: [rows.pop()])
    options = ["--quick", "--api", "spconv"]
    assert memory.main(options) == 1


@pytest.mark.parametrize("rows", (10, 3000))
def test_voxels_of_a_surface(rows):
    coords, extent = memory_levels.surface(rows)
    assert coords.shape == (rows, 4) and coords.dtype == torch.int32
    assert len(coords.unique(dim=0)) == rows
    assert int(coords.min()) >= 0 and int(coords.max()) < extent
    assert torch.equal(coords, memory_levels.surface(rows)[0])
