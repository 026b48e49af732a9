"""How much memory captured maps may hold, and which give way."""

from __future__ import annotations

import types

import pytest
import torch

from sparse_bridge.core.capture import graph_cache
from sparse_bridge.core.capture.graph_cache import MapGraphs

HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(graph_cache, "_shelf", graph_cache._Shelf())
    return graph_cache._shelf


class Graph(types.SimpleNamespace):
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def put(shelf, owner, size, device=HERE, limit=100):
    graph = Graph(bytes=size, device=device)
    if shelf.holds(graph, owner, limit):
        owner.graphs = [graph, *owner.graphs]
    return graph


def test_the_one_unused_for_longest_gives_way(shelf):
    one, other = MapGraphs(), MapGraphs()
    first, second = put(shelf, one, 40), put(shelf, other, 40)
    shelf.touch(first)
    third = put(shelf, other, 50)
    assert one.graphs == [first] and other.graphs == [third]
    put(shelf, one, 100)
    assert [graph.bytes for graph in one.graphs] == [100] and other.graphs == []
    shelf.touch(second)  # gone: nothing comes back
    assert len(shelf._held) == 1


def test_one_that_is_too_large_stays_away(shelf):
    owner = MapGraphs()
    small = put(shelf, owner, 10)
    put(shelf, owner, 101)
    assert owner.graphs == [small]


def test_devices_do_not_share(shelf):
    owner, other = MapGraphs(), MapGraphs()
    put(shelf, owner, 90, HERE)
    put(shelf, other, 90, THERE)
    assert len(owner.graphs) == len(other.graphs) == 1


def test_everything_is_forgotten(shelf):
    owners = [MapGraphs() for _ in range(3)]
    for owner in owners:
        put(shelf, owner, 10)
    owners[0].clear()
    assert owners[0].graphs == [] and len(shelf._held) == 2
    graph_cache.forget()
    assert not any(owner.graphs for owner in owners) and not shelf._held
