"""CUDA graphs without CUDA: a replay runs what was captured once more, over CPU tensors, and leaves
the results where the capture left them."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from sparse_bridge.core.capture import (
    arena,
    captured_maps,
    captured_model,
    graph_cache,
    kinds,
    padded,
    replay,
    replay_training,
)
from sparse_bridge.core.capture.captured_model import Captured, rebuilt
from sparse_bridge.core.capture.replay_trial import leaves_of


class Stream:
    def __init__(self, *_):
        pass

    def wait_stream(self, _):
        pass

    def synchronize(self):
        pass


def tensors(made):
    """All tensors of what a capture made: maps, a model's output, or gradients."""
    found = []
    if isinstance(made, (list, tuple)):
        return [tensor for one in made for tensor in tensors(one)]
    if isinstance(made, dict):
        return tensors(list(made.values()))
    if isinstance(made, Captured):

        def sparse(y):
            found.append(made.tensors.features_of(y))
            if not made.tensors.on_rows_of(made.twin, y):
                found.append(made.tensors.coordinates_of(y))
            return y

        for value in made.outcome.values():
            rebuilt(made.tensors, value, lambda tensor: found.append(tensor) or tensor, sparse)
        return found
    if isinstance(made, torch.Tensor):
        return [made]
    return [] if made is None else list(made.parts)


class Graph:
    def __init__(self, work):
        self.work, self.made = work, work()

    @torch.no_grad()
    def replay(self):
        with torch.enable_grad():
            again = self.work()
        for mine, theirs in zip(tensors(self.made), tensors(again), strict=True):
            mine.copy_(theirs)


def capture(work, pool):
    assert pool is not None
    graph = Graph(work)
    return graph, graph.made


def capture_from(work, pool):
    return capture(lambda: work([]), pool)


def forward(self, features):
    """A step's forward pass, run once more for a backward pass of its own."""
    graph = self.graph
    graph.features.detach()[: features.shape[0]].copy_(features)
    with torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
        # A graph ends before a trial puts statistics back, so that replays move them.
        patch.setattr(captured_model, "statistics_kept", contextlib.nullcontext)
        graph.made = graph.forward.work()
    graph.leaves = leaves_of(graph.made)
    pairs = zip(graph.leaves, graph.levels, strict=True)
    return tuple(leaf.detach()[: self.rows[level]].clone() for leaf, level in pairs)


def replays_on_the_cpu(monkeypatch):
    """Let models over CPU tensors be replayed, besides."""
    graphs_on_the_cpu(monkeypatch)
    for module in (replay, replay_training):
        monkeypatch.setattr(module, "captured_from", capture_from)
    monkeypatch.setattr(replay_training, "captured", capture)
    monkeypatch.setattr(kinds, "capturable", lambda features: padded.current() is None)
    monkeypatch.setattr(replay_training._Run, "forward", forward)


def graphs_on_the_cpu(monkeypatch):
    """Let maps over CPU tensors be captured, as far as Python goes."""
    current, empty = Stream(), torch.empty
    event = types.SimpleNamespace(record=lambda *_: None, synchronize=lambda: None)
    pretended = {
        "Stream": Stream,
        "Event": lambda: event,
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: current,
        "memory_reserved": lambda *_: 0,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (1 << 30, 1 << 36),
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    )
    monkeypatch.setattr(captured_maps, "_random_numbers_apart", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(captured_maps, "captured", capture)
    streams = types.SimpleNamespace(current=lambda: current)
    for module in (captured_maps, arena):
        monkeypatch.setattr(module, "Streams", lambda _: streams)
    monkeypatch.setattr(graph_cache, "current", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(graph_cache, "possible", lambda cmap, target: graph_cache._wanted())
