"""Counts of redundant work, and the peers that time what is counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks import peers
from benchmarks.redundancy import counted, main, present_in, redundancy
from benchmarks.workloads import load, pair_count
from sparse_bridge import settings


def test_counts_of_a_table_that_can_be_counted_by_hand():
    """Rows alternate between two masks: an order needs each tile's offsets once, none twice."""
    present = torch.zeros(4, 256, dtype=torch.bool)
    present[0, ::2] = present[3, 1::2] = present[1] = True
    assert [counted(present, splits, 64) for splits in (0, 1, 2, 4)] == [1024, 512, 512, 512]
    assert counted(present[:, :65], 0, 64) == 4 * 128
    both = torch.zeros(2, 128, dtype=torch.bool)
    both[0, :64] = both[1, 32:96] = True  # four masks of 32 rows: two in each tile
    assert counted(both, 1, 64) == 3 * 64 and counted(both, 2, 64) == 2 * 64


def test_splits_of_a_scene():
    scan = load("sheet:1000")
    present = present_in(scan)
    assert present.shape == (27, 1000) and int(present.sum()) == pair_count(scan)
    found = redundancy(present)
    for tile in range(2):
        shares = [found[splits][tile] for splits in range(5)]
        assert shares == sorted(shares, reverse=True) and shares[-1] >= 1


def test_the_table(capsys):
    main(["sheet:500"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sheet:500: 500 rows") and len(lines) == 7


@pytest.mark.parametrize(
    "name, flow", [("bridge", "auto"), ("bridge_unmasked", "unmasked"), ("bridge_masked_3", "masked:3")]
)
def test_peers_that_force_a_dataflow(name, flow, monkeypatch):
    monkeypatch.setattr("sparse_bridge.enable", lambda *args, **options: None)
    monkeypatch.setitem(peers.PEERS, name, (lambda *args: args, *peers.PEERS[name][1:]))
    with settings.override():
        assert peers.load(name) == (name, "spconv") and settings.get().dataflow == flow
