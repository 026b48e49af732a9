"""Which graph's maps are queued before a call has been looked at."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch

import sparse_bridge
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import captured_maps, padded
from sparse_bridge.core.capture.graph_maps import EarlyMaps, smallest
from sparse_bridge.core.capture.replay import Replayer
from sparse_bridge.core.capture.replay_training import TrainingReplayer

from . import doors
from .pretended import replays_on_the_cpu


def kinds(*capacities):
    return [SimpleNamespace(capacity=one, name=number) for number, one in enumerate(capacities)]


def test_the_smallest_with_capacity():
    of = kinds(512, 2048, 1024, 1024)
    assert smallest(of, 512, 500).name == 0
    assert smallest(of, 640, 630).name == 3  # of several the one that was used last
    assert smallest(of, 2048, 1500).name == 1
    assert smallest(of[:2], 640, 600) is None  # far too large
    assert smallest(of, 4096, 4000) is None and smallest([], 512, 500) is None


class Kind:
    def __init__(self, capacity):
        self.capacity = capacity


class Graph:
    def __init__(self, serves=True):
        self.maps = SimpleNamespace(serves=lambda box: serves)


def test_wrong_guesses_come_to_an_end():
    root = torch.zeros(500, 4), None
    early, graph = EarlyMaps(), Graph()
    graphs = {Kind(padded.capacity_of(500)): graph}
    for right in (False, False, True, False, False, False):
        assert early.likely(graphs, root) is graph
        early.started = graph
        early.told(graph if right else None)
        early.started = None
    assert early.likely(graphs, root) is None
    early.told(graph)  # nothing was guessed
    assert early.likely(graphs, root) is None


def test_no_guess_for_other_bounds_or_without_graphs():
    root, kind = (torch.zeros(500, 4), None), Kind(padded.capacity_of(500))
    assert EarlyMaps().likely({}, root) is None
    assert EarlyMaps().likely({kind: Graph(serves=False)}, root) is None


@pytest.mark.emulated
@pytest.mark.usefixtures("nothing_learnt")
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_maps_are_queued_before_the_modules_are_looked_at(kernel_lane, monkeypatch, trains):
    """And a module that listens by then leaves the call as it is."""
    device, told = kernel_lane.device, []
    if device == "cpu":
        replays_on_the_cpu(monkeypatch)
    monkeypatch.setattr(padded, "_LEAST", 512)
    with doors.standin("spconv") as module:
        plain = doors.network(module, "spconv", device).train(trains)
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        mode = TrainingReplayer if trains else Replayer
        own_start, own_possible = captured_maps.CapturedMaps.start, mode.possible
        own_allowed = mode.allowed
        monkeypatch.setattr(
            captured_maps.CapturedMaps, "start",
            lambda *given: told.append("maps") or own_start(*given),
        )  # fmt: skip
        monkeypatch.setattr(
            mode, "possible", lambda one: told.append("modules") or own_possible(one)
        )
        for seed in range(10):
            told.clear()
            if seed == 5:  # another thread's step begins between two questions
                answers = itertools.chain([True], itertools.repeat(False))
                monkeypatch.setattr(mode, "allowed", lambda _, told=answers: next(told))
            if seed == 6:
                monkeypatch.setattr(mode, "allowed", own_allowed)
                model.deep.register_forward_hook(lambda *_: told.append("hook"))
            x = doors.scene(module, "spconv", seed, device, 0.3)
            with torch.set_grad_enabled(trains):
                found, expected = model(x), plain(x)
            for key in ("out", "deep"):
                torch.testing.assert_close(
                    protocol.features_of(found[key]), protocol.features_of(expected[key]),
                    rtol=2e-3, atol=1e-3,
                )  # fmt: skip
            if trains:
                protocol.features_of(found["out"]).sum().backward()
            assert seed != 4 or told == ["maps", "modules"]
            assert seed != 5 or told == ["modules", "maps"]
            assert seed not in (6, 7, 8) or (told[:2] == ["maps", "modules"] and "hook" in told)
        # Three guesses have been for nothing. Later the layers' own maps may come from a graph.
        assert told[0] == "modules" and told[-1] == "hook"
