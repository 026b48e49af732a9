"""CUDA graphs without CUDA: a replay runs what was captured once more, over CPU tensors, and leaves
the results where the capture left them."""

from __future__ import annotations

import contextlib
import types

import torch

from sparse_bridge import settings
from sparse_bridge.core import captured_maps, map_graph
from sparse_bridge.core.captured_maps import CapturedMaps


class Stream:
    def __init__(self, *_):
        pass

    def wait_stream(self, _):
        pass

    def synchronize(self):
        pass


class Graph:
    def __init__(self, work):
        self.work, self.made = work, work()

    def replay(self):
        again = self.work()
        for old, new in zip(self.made or (), again or (), strict=True):
            for one, other in zip(old, new, strict=True):
                for mine, theirs in zip(
                    map_graph._parts(one), map_graph._parts(other), strict=True
                ):
                    mine.copy_(theirs)


def capture(work, pool):
    assert pool is not None
    graph = Graph(work)
    return graph, graph.made


def start(self, coords, own=CapturedMaps.start):
    """New levels land where the captured ones lie."""
    kept = dict(self.scene.prepared[1])
    self._chain.cmap._table = None  # which the first capture filled
    own(self, coords)
    for level, made in self._chain.coords().items():
        kept[level].copy_(made)


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
    monkeypatch.setattr(CapturedMaps, "start", start)
    monkeypatch.setattr(map_graph, "possible", lambda cmap, target: settings.get().map_graphs)
