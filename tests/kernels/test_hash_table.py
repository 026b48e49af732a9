"""The hash table against Python dictionaries: crowded, full, overflowing, with repeats."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.geometry.offsets import Offsets
from sparse_bridge.kernels.maps import hash_table
from tests.clouds import cloud
from tests.kernels.calls import find, insert, schedules

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

SMALL, LARGE = (9, 10), (1 << 20, 1 << 20)  # keys of 32 and of 64 bits


def check(lane, coords, box, capacity, alive=None):
    """Every live row finds the first row of its coordinate; the counters count."""
    table, slots = insert(lane, coords, box, capacity, alive=alive)
    first, live = {}, []
    for row, site in enumerate(map(tuple, coords.tolist())):
        inside = all(0 <= c < size for c, size in zip(site, box.size, strict=True))
        live.append(inside and (alive is None or int(alive[row]) >= 0))
        if live[-1]:
            first.setdefault(site, row)
    assert table.counters() == (len(first), sum(live), False)
    got = find(lane, table, len(coords), coords, box, alive=alive).nbr[0].tolist()
    want = [first[tuple(s)] if ok else -1 for s, ok in zip(coords.tolist(), live, strict=True)]
    assert got == want
    assert [slot >= 0 for slot in slots[0].tolist()] == live
    keys = table.keys[slots[0][slots[0] >= 0].long()]
    assert len(set(keys.tolist())) == len(first), "equal coordinates share a slot, others do not"
    return table


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["int32", "int64"])
@pytest.mark.parametrize("n", [1, 2, 31, 64, 127, 128, 129, 180])
def test_every_row_is_found(kernel_lane, n, shape):
    box = Box.grid(2, shape)
    assert box.key64 == (shape == LARGE)
    coords = cloud(SMALL, 2, 1.0)[:n]
    coords[:, 1:] *= torch.tensor([(s - 1) // 10 for s in shape], dtype=torch.int32).clamp(min=1)
    coords = coords[((coords[:, 1:] < torch.tensor(shape)).all(1))].contiguous()
    check(kernel_lane, coords, box, 512)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["int32", "int64"])
def test_a_table_that_is_full(kernel_lane, shape):
    """As many keys as slots: the longest probe sequences there are, and none is lost."""
    coords = cloud(SMALL, 2, 1.0)[:64].contiguous()
    table = check(kernel_lane, coords, Box.grid(2, shape), 64)
    assert (table.keys >= 0).all()


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["int32", "int64"])
def test_a_table_that_overflows_says_so(kernel_lane, shape):
    coords = cloud(SMALL, 2, 1.0)[:65].contiguous()
    table, _ = insert(kernel_lane, coords, Box.grid(2, shape), 64)
    inserted, live, overflow = table.counters()
    assert overflow and live == 65 and inserted == 64


def test_probing_is_bounded(kernel_lane, rules):
    """Keys that crowd one neighbourhood run out of probes long before the table is full."""
    rules.set(hash_table, MAX_PROBES=3)
    coords = cloud(SMALL, 2, 1.0)[:60].contiguous()
    table, _ = insert(kernel_lane, coords, Box.grid(2, SMALL), 64)
    assert table.counters()[2]


def test_full_groups_do_not_queue(kernel_lane, monkeypatch):
    """Cells of a solid fill groups of four slots. A group that meets another moves past it in one
    probe, not in four: steps of one slot need more than 20 here."""
    monkeypatch.setattr(hash_table, "MAX_PROBES", 8)
    coords, box = cloud((8, 8, 8), 1, 1.0), Box.grid(1, (8, 8, 8))
    table, _ = insert(kernel_lane, coords, box, 2048)
    assert table.counters() == (512, 512, False)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["int32", "int64"])
def test_of_equal_coordinates_the_first_row_counts(kernel_lane, shape):
    coords = cloud(SMALL, 2, 0.4)
    order = torch.randperm(3 * len(coords), generator=torch.Generator().manual_seed(1))
    check(kernel_lane, coords.repeat(3, 1)[order].contiguous(), Box.grid(2, shape), 256)
    same = torch.tensor([[1, 4, 5]], dtype=torch.int32).repeat(200, 1)
    check(kernel_lane, same, Box.grid(2, shape), 64)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["int32", "int64"])
def test_rows_outside_the_box_and_dead_rows_are_skipped(kernel_lane, shape):
    coords = cloud(SMALL, 2, 0.6)
    extremes = [[-1, 0, 0], [2, 0, 0], [0, -1, 0], [0, 0, -1], [0, 2**31 - 1, 0], [0, 0, -(2**31)]]
    coords = torch.cat([coords, torch.tensor(extremes, dtype=torch.int32)])
    check(kernel_lane, coords, Box.grid(2, shape), 256)
    alive = torch.arange(len(coords), dtype=torch.int32)
    alive[::3] = -1
    check(kernel_lane, coords, Box.grid(2, shape), 256, alive)


def test_boxes_anywhere(kernel_lane):
    """Keys count from the box's own corner, up to the ends of 32 bits."""
    for lo in ((0, -(2**31), 2**31 - 40), (3, 70000, -70000)):
        box = Box.of(lo, (2, 9, 10))
        coords = cloud(SMALL, 2, 0.5) + torch.tensor(lo, dtype=torch.int32)
        table, _ = insert(kernel_lane, coords, box, 256)
        assert table.counters() == (len(coords), len(coords), False)
        got = find(kernel_lane, table, len(coords), coords, box).nbr[0].tolist()
        assert got == list(range(len(coords)))


def test_keys_that_would_meet_if_they_wrapped(kernel_lane):
    """Coordinates whose row-major keys agree in their low 32 bits."""
    box = Box.grid(1, (1 << 16, 1 << 16, 1 << 8))
    coords = torch.tensor([[0, 0, 0, 5], [0, 1 << 8, 0, 5], [0, 2 << 8, 0, 5], [0, 3 << 8, 0, 5]])
    check(kernel_lane, coords.int(), box, 64)


def test_absent_keys_are_not_found(kernel_lane):
    """Searching a crowded table for neighbours that are not there ends, with -1."""
    coords = cloud(SMALL, 2, 1.0)
    there, absent = coords[:120].contiguous(), coords[120:].contiguous()
    table, _ = insert(kernel_lane, there, Box.grid(2, SMALL), 128)
    got = find(kernel_lane, table, len(there), absent, Box.grid(2, SMALL)).nbr[0]
    assert len(absent) and (got == -1).all()


@pytest.mark.parametrize("n_offsets", [2, 9, 33])
def test_several_offsets_at_once(kernel_lane, n_offsets):
    """Equal results of rows and offsets share one slot, which the smallest row claims."""
    values = [(v // 7 - 2, v % 7 - 3) for v in range(n_offsets)]
    coords, box = cloud(SMALL, 2, 0.3), Box.grid(2, SMALL)
    table, slots = insert(kernel_lane, coords, box, 512, Offsets.of(values))
    assert not table.counters()[2]
    reached: dict = {}
    for v, offset in enumerate(values):
        for row, (batch, *c) in enumerate(coords.tolist()):
            site = (batch, *(a + b for a, b in zip(c, offset, strict=True)))
            inside = all(0 <= a < size for a, size in zip(site, box.size, strict=True))
            slot = int(slots[v, row])
            assert (slot >= 0) == inside
            if inside:
                reached.setdefault(site, set()).add((slot, row))
    places = [{slot for slot, _ in found} for found in reached.values()]
    assert all(len(one) == 1 for one in places) and len(set.union(*places)) == len(reached)
    for found in reached.values():
        slot = next(iter(found))[0]
        assert len(coords) - 1 - int(table.values[slot]) == min(row for _, row in found)


def test_the_same_table_on_every_run(kernel_lane):
    coords = cloud(SMALL, 2, 0.8)
    coords = torch.cat([coords, coords[:40]]).contiguous()
    box = Box.grid(2, SMALL)
    runs = [insert(kernel_lane, coords, box, 256) for _ in schedules(kernel_lane)]
    for table, slots in runs[1:]:
        assert torch.equal(slots, runs[0][1])
        assert torch.equal(table.keys, runs[0][0].keys)
        assert torch.equal(table.values, runs[0][0].values)
