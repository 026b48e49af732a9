"""What must not happen while a graph is captured, on graphs that are pretended."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from unittest import mock

import numpy
import pytest
import torch
from torch import nn

from sparse_bridge import policy
from sparse_bridge.core.capture import graph_capture, model_graphs
from sparse_bridge.core.capture.call_kind import CallKind
from sparse_bridge.core.capture.captured_maps import captured
from sparse_bridge.core.capture.graph_capture import GraphMemory, KeepAlive, captured_from
from sparse_bridge.core.capture.replay import Replayer
from sparse_bridge.core.capture.replay_training import TrainingReplayer
from sparse_bridge.kernels.runtime import triton_compat, uploads
from tests.core.capture.pretended_streams import Streams
from tests.patience import PATIENCE


class Graph:
    """Notes the threads that capture, and graphs that are destroyed meanwhile."""

    capturing, spoilt, alive = set(), [], 0

    def __init__(self):
        Graph.alive += 1
        # The garbage collector looks into no numpy array: like what lies behind a graph in C++, it
        # ends with the last reference.
        self.handle = numpy.zeros(1)
        weakref.finalize(self.handle, self.destroyed)

    @staticmethod
    def destroyed():
        Graph.alive -= 1
        if Graph.capturing:
            Graph.spoilt.append(threading.get_ident())

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        Graph.capturing.add(threading.get_ident())

    def capture_end(self):
        Graph.capturing.discard(threading.get_ident())

    def replay(self):
        pass


@pytest.fixture(autouse=True)
def graphs(fake_gpu, monkeypatch):
    fake_gpu.has(graph=Graph, device=0, current_stream=mock.Mock)
    monkeypatch.setattr(triton_compat, "end_pool", lambda device, pool: None)
    Graph.capturing, Graph.spoilt, Graph.alive = set(), [], 0
    yield
    assert not Graph.spoilt and not Graph.capturing and gc.isenabled()


def made():
    return captured(lambda: None, None)[0]


def replayer_of(graph):
    model = nn.Linear(1, 1)
    found = Replayer(TrainingReplayer(model, lambda x: None))
    found.kept = model  # which nobody else keeps
    found.kinds["kind"] = kind = CallKind()
    kind.graphs = [graph]
    return found


def _last_reference():
    held = [made()]
    return held.clear


def _garbage():
    cycle = [made()]
    cycle.append(cycle)
    return gc.collect


def _a_model_that_is_dropped():
    replayer = replayer_of(made())
    return lambda: replayer.drop("a layer outside of it uses its kernel maps.")


def _a_model_that_is_deleted():
    models = [replayer_of(made())]
    return models.clear


WAYS = [_last_reference, _garbage, _a_model_that_is_dropped, _a_model_that_is_deleted]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[1:])
def test_a_graph_outlives_captures(way):
    let_go = way()
    assert Graph.alive == 1
    graph, alive = captured(lambda: (let_go(), Graph.alive)[1], None)
    assert alive == 2
    assert Graph.alive == 1  # the one that was let go of has followed
    del graph
    assert not Graph.alive


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__[1:])
def test_captures_of_another_thread(way):
    let_go, begun, done = way(), threading.Event(), threading.Event()

    def work():
        begun.set()
        assert done.wait(PATIENCE)

    thread = threading.Thread(target=lambda: captured(work, None))
    thread.start()
    assert begun.wait(PATIENCE)
    let_go()
    done.set()
    thread.join()
    assert not Graph.alive


def test_graphs_of_one_stream_go_together(fake_gpu, monkeypatch):
    """Newer torch frees what others of that stream still use when one of them is destroyed."""
    streams = Streams()
    again = itertools.cycle([streams.new() for _ in range(3)])
    fake_gpu.has(streams=streams, numbered=streams, graph_pool=object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: next(again))
    monkeypatch.setattr(graph_capture.expandable_segments, "possible", lambda index: False)
    memories = [GraphMemory(torch.device("cuda", 0))]

    def graph_in(memory):
        with streams.on(memory.stream):
            return made()

    first, second = graph_in(memories[0]), graph_in(memories[0])
    for _ in range(4):  # streams are given out in turn, and not those of graphs that serve
        memories.append(GraphMemory(torch.device("cuda", 0)))
        assert memories[-1].stream is not memories[0].stream
    other = graph_in(memories[1])
    del first
    assert Graph.alive == 3
    del other
    assert Graph.alive == 2
    del second
    assert not Graph.alive
    assert memories[0].stream in {GraphMemory(torch.device("cuda", 0)).stream for _ in range(3)}


def test_memory_that_has_had_many_graphs(fake_gpu, monkeypatch, rules):
    streams = Streams()
    fake_gpu.has(streams=streams, numbered=streams, graph_pool=object)
    monkeypatch.setattr(graph_capture.expandable_segments, "possible", lambda index: False)
    rules.set(policy, STREAM_GRAPHS=3)
    memory = GraphMemory(torch.device("cuda", 0))
    with streams.on(memory.stream):
        held = [made()]
        for _ in range(2):
            assert not memory.full()
            made()
    assert memory.full() and Graph.alive == 3
    held.clear()
    assert not memory.full() and not Graph.alive


def test_a_capture_that_fails():
    held = [made()]

    def work(around):
        with around[0]:
            held.clear()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        captured_from(work, None)
    gc.collect()
    assert not Graph.alive


def test_memory_that_a_capture_has_used():
    memory = torch.zeros(2)
    there, owner = weakref.ref(memory), [KeepAlive(memory)]
    del memory
    _, during = captured(lambda: (owner.clear(), there() is not None)[1], None)
    assert during and there() is None


def test_the_cache_of_the_allocator(fake_gpu):
    """It can be emptied while no thread captures."""
    emptied = []
    fake_gpu.has(empty_cache=lambda: emptied.append(True))
    captured(graph_capture.empty_cache, None)
    assert not emptied
    graph_capture.empty_cache()
    assert emptied == [True]


def test_numbers_for_captured_launches(fake_gpu):
    """They are written once the capture is over, in memory that lives as long as the graph."""
    fake_gpu.has(captures=lambda device: bool(Graph.capturing))
    held, here = [torch.zeros(5, dtype=torch.int64)], torch.device("cpu")

    def work():
        made = [uploads.uploaded([5, 1 << 40], here), uploads.uploaded([7, 8, 9], here)]
        assert not held[0].any()
        return [one.data_ptr() for one in made]

    with_graph, places = captured(work, None, held[0])
    room = weakref.ref(held.pop())
    assert room().tolist() == [5, 1 << 40, 7, 8, 9]
    assert places == [room().data_ptr(), room()[2:].data_ptr()]
    del with_graph
    assert room() is None


def test_more_numbers_than_there_is_room_for(fake_gpu):
    fake_gpu.has(captures=lambda device: bool(Graph.capturing))
    here, room = torch.device("cpu"), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="2 numbers or more; 1 fit"):
        captured(lambda: uploads.uploaded([1, 2], here), None, room)
    assert uploads.uploaded([7, 8], here).tolist() == [7, 8] and not room.any()


def test_memory_of_calls_without_a_graph(monkeypatch):
    """It goes back when they are over, and not again and again."""
    given_back = []
    monkeypatch.setattr(model_graphs, "empty_cache", lambda: given_back.append(len(told)))
    model, told = nn.Identity(), []
    graphs = TrainingReplayer(model, lambda _: None)

    def run(calls):
        for one in calls:
            told.append(one)
            (graphs.computed if one == "eager" else graphs.replayed)()

    run(["replay"] * 40)
    assert not given_back  # there was nothing to give
    run(["eager", "replay", "eager"] + ["replay"] * 15)
    assert not given_back
    run(["replay"] * 30)
    assert given_back == [40 + 3 + 16]
    for _ in range(19):
        run(["eager"] + ["replay"] * 16)
    assert len(given_back) == 8 + 1  # the first, then the sixteenth
    given_back.clear()
    for _ in range(20):
        graphs.computed(compared=True)
        run(["replay"] * 3)
    assert len(given_back) == 20  # behind every comparison: there are few


@pytest.mark.parametrize("first", [True, False], ids=["first on the stream", "after others"])
def test_the_workspace_of_products(first, fake_gpu, monkeypatch):
    """The first graph of a thread on a stream that multiplies follows one which has the workspace alone; that stays, if
    it has made one."""
    streams, allocated = Streams(), [0]
    fake_gpu.has(streams=streams, numbered=streams, graph_pool=object)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(graph_capture.expandable_segments, "possible", lambda index: False)
    memory, pools = GraphMemory(torch.device("cpu")), []

    def captured(work, pool):
        pools.append(pool)
        found = made()
        allocated[0] += first
        return found, None

    monkeypatch.setattr(graph_capture, "captured", captured)
    with streams.on(memory.stream):
        held = [memory.captured(lambda pool: made())]
        assert not pools and Graph.alive == 1
        memory.multiplies = True
        held += [memory.captured(lambda pool: made()) for _ in range(2)]
        assert len(pools) == 1 and pools[0] is not memory.pool and Graph.alive == 4
        held.clear()
        assert Graph.alive == first
        assert GraphMemory(torch.device("cpu"), memory).multiplies
