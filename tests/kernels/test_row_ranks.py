"""New coordinates in the order of their keys, and a table that follows, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.kernels.maps import row_ranks
from sparse_bridge.kernels.maps.hash_table import FLAGS, HashTable
from sparse_bridge.kernels.runtime.parts import Slab
from tests.kernels.calls import schedules, target_of

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

POISON = 0x5A5A5A5A
FEW = 64  # here
# Around the rows of a program that counts ranks, its keys at once, other programs' rows, and FEW.
ROWS = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300]
BOXES = {
    "1D": Box.of((0, -300), (3, 700)),
    "2D": Box.of((0, -9, 4), (4, 30, 25)),
    "3D": Box.of((0, -9, 4, -20), (4, 30, 25, 40)),
    "4D": Box.of((2, 0, -3, 5, -6), (3, 7, 9, 11, 13)),
    "32 bits": Box.of((0, -(1 << 14), 0, -50), (2, 1 << 15, 1 << 8, 127)),
    "64 bits": Box.of((0, -(1 << 20), -7, -(1 << 19)), (5, 1 << 21, 1 << 12, 1 << 20)),
    "62 bits": Box.of((0, -(1 << 29), 1 << 29), (7, 1 << 30, 1 << 29)),
}


@pytest.fixture(autouse=True)
def poisoned(rules, monkeypatch):
    """Memory that is taken holds something, and few rows are few."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(POISON))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(POISON))
    rules.set(row_ranks, FEW_ROWS=FEW)


def sites(box, n_rows, seed=0, without=()):
    """Distinct coordinates of the box as lists, among them its corners; no rows of the batch items
    `without`."""
    draw, found = random.Random(seed), {}
    first, last = box.lo, tuple(a + b - 1 for a, b in zip(box.lo, box.size, strict=True))
    while len(found) < n_rows:
        site = tuple(draw.randint(a, b) for a, b in zip(first, last, strict=True))
        site = (last, first)[len(found)] if len(found) < 2 and not without else site
        if site[0] not in without:
            found[site] = None
    rows = list(found)
    draw.shuffle(rows)
    return rows


def by_key(rows, ascending=False):
    """Rows in order: by batch, then by the axes from the last to the first, or ascending."""
    turn = 1 if ascending else -1
    return sorted(range(len(rows)), key=lambda row: (rows[row][0], *rows[row][1:][::turn]))


def table_of(lane, box, n_rows, seed=0):
    """A table with the values of `n_rows` rows in random slots, and the slots; the counter of new
    rows says that all are in use."""
    capacity = max(64, 1 << (2 * n_rows).bit_length())
    table = HashTable.allocate(capacity, box.key64, torch.device(lane.device))
    slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(seed))[:n_rows]
    values = torch.full((capacity,), -1, dtype=torch.int32)
    values[slots] = -2 - torch.arange(n_rows, dtype=torch.int32)
    table.values.copy_(values)
    table.keys.copy_(7 * torch.arange(capacity))
    table.flags[FLAGS - 1] = n_rows - 1
    return table, slots


def check(lane, box, rows, live=None, behind=POISON, slab=None, ascending=False):
    """Sort `rows`, of which `live` are in use, before others that hold `behind`."""
    n_rows = len(rows) if live is None else live
    coords = torch.full((len(rows), len(box.size)), behind, dtype=torch.int32)
    coords[:n_rows] = torch.tensor(rows, dtype=torch.int32)[:n_rows]
    table, slots = table_of(lane, box, len(rows), len(rows))
    table.flags[FLAGS - 1] = n_rows - 1
    untouched = table.flags.tolist(), table.keys.tolist()
    there, bounds = coords.to(lane.device), box.layout(torch.device(lane.device)).bounds
    count = None if live is None else table.total
    moved = row_ranks.sort_rows(table, there, bounds, target_of(lane), count, slab, ascending)
    moved = moved.cpu()
    order = [*by_key(rows[:n_rows], ascending), *range(n_rows, len(rows))]
    assert moved.dtype == torch.int32 and torch.equal(moved, coords[order])
    assert torch.equal(there.cpu(), coords), "what was given stays"
    rank = torch.tensor(order).argsort().int()
    want = torch.full((table.capacity,), -1, dtype=torch.int32)
    want[slots] = -2 - rank
    assert torch.equal(table.values.cpu(), want)
    assert (table.flags.tolist(), table.keys.tolist()) == untouched
    return moved


@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("name", ["3D", "64 bits"])
def test_all_rows(kernel_lane, name, n_rows):
    check(kernel_lane, BOXES[name], sites(BOXES[name], n_rows))


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("n_rows", [FEW, FEW + 1])
@pytest.mark.parametrize("name", BOXES)
def test_dimensions_and_keys(kernel_lane, name, n_rows, ascending):
    box = BOXES[name]
    assert box.key64 == (name in ("64 bits", "62 bits")) and not box.oversized
    check(kernel_lane, box, sites(box, n_rows, 1), ascending=ascending)


@pytest.mark.parametrize("n_rows, live", [(40, 33), (300, 257)])
def test_ascending_rows_in_use(kernel_lane, n_rows, live):
    check(kernel_lane, BOXES["3D"], sites(BOXES["3D"], n_rows), live, ascending=True)


def test_the_largest_keys_of_either_width():
    assert BOXES["32 bits"].volume < 1 << 31 <= 2 * BOXES["32 bits"].volume
    assert BOXES["62 bits"].volume < 1 << 62 <= 2 * BOXES["62 bits"].volume
    assert not BOXES["62 bits"].steps, "too far out for keys that count from zero"


@pytest.mark.parametrize("behind", [0, POISON, -(1 << 31)])
@pytest.mark.parametrize(
    "n_rows, live",
    [
        (1, 0),
        (1, 1),
        (40, 0),
        (40, 1),
        (40, 32),
        (40, 33),
        (40, 40),
        (FEW, 31),
        (FEW, FEW),
        (FEW + 1, 0),
        (FEW + 1, 1),
        (FEW + 1, FEW),
        (FEW + 1, FEW + 1),
        (300, 256),
        (300, 257),
    ],
)
@pytest.mark.parametrize("name", ["2D", "64 bits"])
def test_rows_in_use(kernel_lane, name, n_rows, live, behind):
    """What is behind them stays where it is, whatever it is."""
    check(kernel_lane, BOXES[name], sites(BOXES[name], n_rows), live, behind)


@pytest.mark.parametrize("n_rows", [30, 100])
def test_more_rows_than_there_is_memory_for(kernel_lane, n_rows):
    """The counter says more; values of rows that were not written are -1."""
    box, target = BOXES["2D"], target_of(kernel_lane)
    rows = sites(box, n_rows)
    table, _ = table_of(kernel_lane, box, n_rows)
    table.flags[FLAGS - 1] = 5 * n_rows
    coords = torch.tensor(rows, dtype=torch.int32).to(kernel_lane.device)
    bounds = box.layout(coords.device).bounds
    moved = row_ranks.sort_rows(table, coords, bounds, target, table.total)
    assert moved.tolist() == [list(rows[row]) for row in by_key(rows)]


@pytest.mark.parametrize("without", [(0,), (1,), (3,), (0, 2, 3)])
@pytest.mark.parametrize("n_rows", [50, 150])
def test_empty_batch_items(kernel_lane, n_rows, without):
    check(kernel_lane, BOXES["3D"], sites(BOXES["3D"], n_rows, 2, without))


@pytest.mark.parametrize("n_rows", [FEW - 1, FEW, FEW + 1])
@pytest.mark.parametrize("name", ["3D", "64 bits"])
def test_memory_that_others_share(kernel_lane, name, n_rows):
    """No more of it is written than was said."""
    size = row_ranks.scratch_elements(n_rows)
    slab = Slab(8 + size + 8, torch.device(kernel_lane.device), 77)
    before = slab.part(8)
    check(kernel_lane, BOXES[name], sites(BOXES[name], n_rows), n_rows - 3, slab=slab)
    assert before.view().tolist() == [77] * 8
    assert before.memory[8 + size :].tolist() == [77] * 8


@pytest.mark.parametrize("name", ["3D", "64 bits"])
def test_few_rows_are_sorted_as_many_are(kernel_lane, rules, name):
    rows = sites(BOXES[name], 200, 3)
    many = check(kernel_lane, BOXES[name], rows, 150)
    rules.set(row_ranks, FEW_ROWS=200)
    assert torch.equal(many, check(kernel_lane, BOXES[name], rows, 150))


def test_whatever_the_schedule(kernel_lane):
    for _ in schedules(kernel_lane):
        check(kernel_lane, BOXES["3D"], sites(BOXES["3D"], FEW, 4), 50)
        check(kernel_lane, BOXES["3D"], sites(BOXES["3D"], 2 * FEW, 4), 100)
