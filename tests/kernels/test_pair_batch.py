"""Pair lists of several maps at once are those of each alone."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch

from sparse_bridge.kernels.maps import pair_batch
from sparse_bridge.kernels.maps.mask_order import mask_order
from sparse_bridge.kernels.maps.pair_batch import ListsInTurn, PairBatch
from sparse_bridge.kernels.maps.tile_list import TILE
from sparse_bridge.kernels.maps.tile_packing import compact_pairs, pack_tiles
from tests.kernels.calls import target_of
from tests.kernels.test_mask_order import table
from tests.kernels.test_tile_batch import counted, poisoned

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

# Offsets, lists, rows.
KINDS = [(27, 14, 300), (8, 8, 2 * TILE + 1), (65, 65, 130), (1, 1, 1), (27, 27, TILE), (27, 14, 1)]


def tiles_of(lane, tables):
    target = target_of(lane)
    return [pack_tiles(one, mask_order(one, target), target) for one in tables]


def assert_same(batch, tiles, lists, target):
    for place, (one, count) in enumerate(zip(tiles, lists, strict=True)):
        want = compact_pairs(one, count, target)
        for mine, theirs in zip(batch.take(place), want, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_lists_are_those_of_each_map(kernel_lane, monkeypatch):
    tables = [table(kernel_lane, volume, rows, seed=rows) for volume, _, rows in KINDS]
    lists = [count for _, count, _ in KINDS]
    tables.append(counted(table(kernel_lane, 27, 257, seed=9), 200))
    tables.append(counted(table(kernel_lane, 8, 64, seed=10), 0))  # without a pair
    lists += [27, 8]
    tiles, target = tiles_of(kernel_lane, tables), target_of(kernel_lane)
    poisoned(monkeypatch)
    batch = PairBatch(tiles, lists, target)
    assert_same(batch, tiles, lists, target)
    starts = [part.data_ptr() for place in range(len(lists)) for part in batch.take(place)[:2]]
    assert all(start % 16 == 0 for start in starts)


def test_many_tiles_are_counted_in_blocks(kernel_lane, rules):
    """Running sums go on from block to block."""
    rules.set(pair_batch, BLOCK=4)
    tables = [table(kernel_lane, 5, rows, seed=rows) for rows in (1100, 512, 640)]
    tiles, target = tiles_of(kernel_lane, tables), target_of(kernel_lane)
    assert [one.n_pairs for one in tiles] == [9, 4, 5]
    assert_same(PairBatch(tiles, [5, 5, 3], target), tiles, [5, 5, 3], target)


def test_without_any_pair(kernel_lane):
    nothing = [counted(table(kernel_lane, 8, 64, seed=i), 0) for i in range(2)]
    tiles, target = tiles_of(kernel_lane, nothing), target_of(kernel_lane)
    batch = PairBatch(tiles, [8, 5], target)
    assert [len(part) for part in batch.take(0)] == [0, 0, 9]
    assert [len(part) for part in batch.take(1)] == [0, 0, 6]


def test_written_once_and_only_when_taken(kernel_lane, calls_of):
    names = calls_of(pair_batch.pairs_kernel, "launch")
    tiles = tiles_of(kernel_lane, [table(kernel_lane, 8, 70 + i) for i in range(3)])
    batch = PairBatch(tiles, [8] * 3, target_of(kernel_lane))
    assert not names
    for place in (2, 0, 1):
        batch.take(place)
    assert len(names) == 1


def test_lists_in_turn_are_those_of_each_map_and_go_with_the_next(kernel_lane, monkeypatch):
    tables = [counted(table(kernel_lane, 27, 257, seed=9), 200), table(kernel_lane, 8, 2 * TILE + 1, seed=3)]
    tiles, target = tiles_of(kernel_lane, tables), target_of(kernel_lane)
    poisoned(monkeypatch)
    rooms = [14 * 257, 8 * (2 * TILE + 1)]
    turns = ListsInTurn(PairBatch(tiles, [14, 8], target, rooms))
    gone = []
    for place in (1, 1, 0, 1):
        lists = turns.take(place)
        assert [len(rows) for rows in lists[:2]] == [rooms[place]] * 2
        want = compact_pairs(tiles[place], [14, 8][place], target)
        for mine, theirs in zip(lists, want, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine[: len(theirs)], theirs)
        assert turns.take(place)[0] is lists[0], "written once a turn"
        gone.append(weakref.ref(lists[0]))
        del lists, mine
    assert [one() is None for one in gone] == [True, True, True, False]
    for copied in (copy.deepcopy(turns), pickle.loads(pickle.dumps(turns))):
        assert copied.take(0) is None and copied.lasting


def test_other_streams_and_copies_take_nothing(kernel_lane, monkeypatch):
    tiles = tiles_of(kernel_lane, [table(kernel_lane, 8, 70)])
    batch = PairBatch(tiles, [8], target_of(kernel_lane))
    for copied in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert copied.take(0) is None
    with monkeypatch.context() as patch:
        patch.setattr(pair_batch, "current_stream", lambda device: 7)
        assert batch.take(0) is None
    assert batch.take(0) is not None
