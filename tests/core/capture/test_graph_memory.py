"""How much memory captured maps may hold, and which give way."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from sparse_bridge.core.capture import arena, graph_cache
from sparse_bridge.core.capture.arena import Arena
from sparse_bridge.core.capture.graph_cache import MapGraphs
from sparse_bridge.core.capture.history import RequestHistory
from sparse_bridge.core.capture.padded import capacity_of
from sparse_bridge.core.geometry.boxes import Box
from sparse_bridge.core.maps.coordinate_map import CoordinateMap

HERE = torch.device("cuda", 0)


class Graph:
    """Counts how often it is told to go."""

    def __init__(self, held):
        self.held, self.gone = held, 0
        held.hold(self)

    def dropped(self):
        self.gone += 1


@pytest.fixture
def held(monkeypatch):
    """An arena in the CPU's memory."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    made = Arena(torch.device("cpu"))
    yield made
    made.clear()


def test_the_one_unused_for_longest_gives_way(held, monkeypatch):
    monkeypatch.setattr(arena, "_MOST_GRAPHS", 2)
    first, second = Graph(held), Graph(held)
    held.hold(first)
    third = Graph(held)
    assert [first.gone, second.gone, third.gone] == [0, 1, 0]
    held.drop(second)
    assert second.gone == 1, "it is gone already"


def test_graphs_share_a_pool_that_lasts_as_long_as_they(held):
    pool = held.pool()
    graph = Graph(held)
    assert held.pool() is pool
    held.drop(graph)
    assert held.pool() is not pool


def test_an_arena_that_grows(held):
    small = held.reserve(1000)
    graph = Graph(held)
    assert len(small) >= 1000 and held.reserve(len(small)) is small and not graph.gone
    large = held.reserve(len(small) + 1)
    assert graph.gone == 1 and not held.graphs and len(large) > len(small)


class Captured(Graph):
    """A capture that takes no time."""

    def __init__(self, owner, cmap, *_):
        super().__init__(arena.arena_of(cmap.device))
        self.arena = self.held


def test_captures_keep_away_from_each_other(held, monkeypatch):
    """Streams of all sizes: a class has to come often, and captures are few among scenes."""
    monkeypatch.setattr(graph_cache, "_MapGraph", Captured)
    monkeypatch.setattr(graph_cache, "possible", lambda *_: True)
    monkeypatch.setattr(graph_cache, "_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(arena.Arena, "follow", lambda _: None)
    graphs, captured = MapGraphs(), []
    box, target = Box.grid(1, (99, 99, 99)), None
    for turn in range(200):
        rows = 1000 * (1 + turn % 9) if turn < 190 else 1000
        cmap = CoordinateMap(torch.zeros(rows, 4, dtype=torch.int32), box)
        if capacity_of(rows) not in graphs.graphs:
            graphs.consider(cmap, target, (), RequestHistory(rows))
            captured += [turn] * (len(graphs.graphs) > len(captured))
    assert captured[0] >= 8 and 4 <= len(captured) <= 7
    assert all(b - a >= 24 for a, b in itertools.pairwise(captured))
    arena.forget()


def test_an_arena_spares_little_beside_the_limit(held):
    elements = arena.MOST_BYTES // 4
    assert len(held.reserve(elements)) == elements, "nothing to spare for others"


def test_devices_have_arenas_of_their_own():
    arena.forget()
    there = torch.device("cuda", 1)
    assert arena.arena_of(HERE) is arena.arena_of(HERE) is not arena.arena_of(there)
    held = arena.arena_of(there)
    graph = Graph(held)
    arena.forget()
    assert graph.gone == 1 and arena.arena_of(there) is not held
    arena.forget()
