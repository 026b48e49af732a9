"""The benchmark of memory limits, on a small level."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
import torch

from benchmarks import memory, memory_levels
from sparse_bridge import memory as limits
from sparse_bridge.errors import MemoryLimitError
from tests.adapters.spconv.apis import without_wheel


@pytest.fixture(autouse=True)
def no_wheel():
    with without_wheel():
        yield


@pytest.fixture(autouse=True)
def one_device(fake_gpu):
    """What is written here does not depend on a GPU."""
    fake_gpu.has(available=False)


@pytest.mark.slow
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
    assert len(printed) == 1 + len(rows) and all(
        line.endswith("same" if row["limit_mib"] is None else "same; passes")
        for line, row in zip(printed[1:], rows, strict=True)
    )


KINDS = (("allocated", 0), ("reserved", 7))
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
    ("convolutions", "more", "text"),
    [
        (90, {}, "passes"),
        (100, {"least_of_process_mib": 130.0}, "error; least for the process: 130.0 MiB"),
        (120, {}, "passes; exceeded by 20.0 MiB in the bridge's layers"),
    ],
)
def test_what_a_program_gets(convolutions, more, text):
    y = torch.ones(1)
    sizes = [size << 20 for size in (130, 200, convolutions)]
    row = memory.row_of(memory.Measured(1.0, y, *sizes), 100 << 20, y)
    assert memory.shown(GPU_ROW | row | more).endswith(f"same; {text}")


@dataclasses.dataclass
class Pretended:
    """A network whose layers take 50 MiB at least, and torch's 90; nothing runs."""

    layers: int = 50 << 20
    process: int = 90 << 20
    free: int = 100 << 20
    tried: list[int] = dataclasses.field(default_factory=list)

    def __call__(self):
        self._need(self.process)

    @contextlib.contextmanager
    def watched(self):
        before, self.process = self.process, self.layers
        try:
            yield
        finally:
            self.process = before

    def _need(self, least):
        if limits.limit is not None and limits.limit < least:
            self.tried.append(limits.limit)
            raise MemoryLimitError("it takes more", limits.limit, least, least)

    def measure(self, *_):
        self._need(self.layers)
        convolutions = 55 << 20 if limits.limit is None else min(limits.limit, 55 << 20)
        return memory.Measured(1.0, torch.ones(1), self.free, self.free, convolutions)


def test_limits_that_are_tried_on_a_gpu(rules, monkeypatch, capsys):
    """Of the layers, which come to an end where the process does not; and of the process, which
    passes what its error names."""
    run = Pretended()
    monkeypatch.setattr(memory, "network_of", lambda *_: contextlib.nullcontext(run))
    monkeypatch.setattr(memory, "measure", lambda run, *_: run.measure())
    monkeypatch.setattr(memory, "run_capped", lambda run, limit, cap: "passes")
    rules.set(memory, SHARES=(0.95, 0.75, 0.4))
    setup = memory.Setup("cuda", torch.float16, 1, 1, 1)
    rows = memory.compare("a", memory.QUICK["1k x 32"], None, "spconv", "whole", setup)
    outcomes = [line.split(";", 1)[-1].strip() for line in capsys.readouterr().out.splitlines()]
    assert [row["limit_mib"] for row in rows] == [None, 95.0, 75.0, 40.0, 50.0, 90.0]
    assert outcomes[1:] == [
        "passes; cap 1.1: passes",
        "error; least for the process: 90.0 MiB",
        "least for the layers: 50.0 MiB",
        "error; least for the process: 90.0 MiB",
        "passes; cap 1.1: passes",
    ]
    assert [row.get("convolutions_mib") for row in rows] == [55.0, 55.0, 55.0, None, 50.0, 55.0]
    assert limits.limit is None


def test_caps_up_to_the_first_that_passes(monkeypatch):
    ends = {1.1: "OutOfMemoryError", 1.25: "passes", 1.5: "passes"}
    monkeypatch.setattr(memory, "run_capped", lambda run, limit, cap: ends[cap])
    found = memory.capped(None, 100, memory.CAPS)
    assert found == {"1.1": "OutOfMemoryError", "1.25": "passes"}
    line = memory.shown(GPU_ROW | {"capped": found})
    assert line.endswith("same; passes; cap 1.1: OutOfMemoryError; cap 1.25: passes")


@pytest.mark.parametrize("error", (None, torch.OutOfMemoryError, MemoryLimitError))
def test_how_a_run_under_a_cap_ends(error, fake_gpu):
    """The process has its whole GPU again behind it."""
    shares, device = [], type("Device", (), {"total_memory": 1000})
    fake_gpu.has(properties=device, set_memory_share=shares.append, empty_cache=tuple, synchronize=tuple)

    def run():
        assert limits.limit == 100
        if error is not None:
            raise error("no room")

    assert memory.run_capped(run, 100, 1.5) == ("passes" if error is None else error.__name__)
    assert shares == [0.15, 1.0]


def test_peaks_of_layers_and_of_all(fake_gpu):
    """Before a layer, between two and behind the last the allocator may have had more. None of it is
    in sight of a layer that begins."""
    peak, seen = [0], []

    def take(size):
        peak[0] = max(peak[0], size)

    counted = lambda: {f"{kind}_bytes": {"all": {"peak": peak[0] + more}} for kind, more in KINDS}  # noqa: E731
    fake_gpu.has(memory_stats=counted, reset_peaks=lambda: peak.__setitem__(0, 0))

    def convolve(number, h):
        seen.append(peak[0])
        take((5, 9)[number])
        return h + 1

    class Coords:
        is_cuda, clone = True, lambda self: self

    def block(h, conv):
        take(20)
        h = conv(h)
        take(30)
        return h

    network = memory_levels.Network(lambda _: convolve, [block, block], Coords(), torch.zeros(1))
    with network.watched() as peaks:
        assert network() == 2
    assert (peaks.convolutions, peaks.allocated, peaks.reserved) == (9, 30, 37) and seen == [0, 0]
    network()
    assert peaks.allocated == 30 and seen[2:] == [20, 30], "it is not watched any longer"


def test_other_bits_are_a_failure(monkeypatch, plain_settings):
    rows = [{"same_bits": True}, {"least_of_layers_mib": 3.0}, {"same_bits": False}]
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
