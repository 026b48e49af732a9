"""One sparse tensor on two streams: what layers keep with its coordinates on one of them, the other
one waits for. No program could order what it never sees."""

from __future__ import annotations

import copy

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.adapters.minkowski import manager
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.device import stream_order, workspace
from sparse_bridge.core.maps.coordinate_map import CoordinateMap
from sparse_bridge.core.maps.map_cache import MapStore
from sparse_bridge.core.ops.row_matrix import RowMatrix
from tests.core.capture.graph_sizes import graphs_of

from . import apis
from .pretended import replays_on_the_cpu, watched
from .pretended_streams import Race
from .test_stream_order import results, same


@pytest.fixture
def streams(fake_gpu, rules, monkeypatch, nothing_learnt):
    if torch.cuda.is_available():
        pytest.skip("a GPU has streams of its own")
    rules.hold(graphs_of(160))
    monkeypatch.setattr(workspace, "_LIMIT_BYTES", -1)  # a CPU has one buffer for all streams
    return replays_on_the_cpu(fake_gpu)


def pair_of(streams):
    """Two streams that have waited for what is queued on the first of all, and for nobody else."""
    pair = streams.new(), streams.new()
    for stream in pair:
        stream.wait_stream(streams.known[0])
    return pair


def on_both(streams, work):
    """What `work` returns on one stream and on another, that no program has ordered."""
    found = []
    for stream in pair_of(streams):
        with streams.on(stream):
            found.append(work())
    for stream in streams.known:
        stream.synchronize()
    return found


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_a_network(streams, fake_gpu, name, trains):
    with apis.standin(name) as module, watched(streams, fake_gpu):
        models = iter([apis.network(module, name, "cpu").train(trains) for _ in range(2)])
        x = apis.scene(module, name, 0, "cpu", 0.3)
        mine, theirs = on_both(streams, lambda: results(next(models), x, trains))
    same(mine, theirs)


_LAYERS = {
    "coordinates": lambda me, x: me.MinkowskiMaxPooling(2, 2, dimension=3)(x).C,
    "pairs": lambda me, x: me.MinkowskiMaxPooling(2, 2, dimension=3)(x).F,
    "means": lambda me, x: me.MinkowskiAvgPooling(2, 2, dimension=3)(x).F,
    "items": lambda me, x: me.MinkowskiGlobalAvgPooling()(x).F,
    "broadcast": lambda me, x: me.MinkowskiBroadcast()(x, me.MinkowskiGlobalAvgPooling()(x)).F,
    "union": lambda me, x: (x + me.MinkowskiPruning()(x, torch.arange(len(x)) % 2 == 0)).F,
    "queries": lambda me, x: x.features_at_coordinates(x.C.float()),
}


@pytest.mark.parametrize("kind", _LAYERS)
def test_layers_of_minkowski(streams, fake_gpu, kind):
    """They keep more with a manager than maps."""
    with apis.standin("minkowski") as module, watched(streams, fake_gpu):
        x = apis.scene(module, "minkowski", 0, "cpu", 0.3)
        mine, theirs = on_both(streams, lambda: _LAYERS[kind](module, x).clone())
    assert torch.equal(mine, theirs)


def test_points_of_minkowski(streams, fake_gpu):
    with apis.standin("minkowski") as module, watched(streams, fake_gpu):
        points = torch.rand(60, 4) * 5
        points[:, 0] = 0
        field = module.TensorField(torch.rand(60, 4), points)
        x = field.sparse()
        mine, theirs = on_both(streams, lambda: x.slice(field).F.clone())
    assert torch.equal(mine, theirs)


def test_coordinates_that_a_replay_left(streams, fake_gpu):
    with apis.standin("minkowski") as module, watched(streams, fake_gpu):
        x = apis.scene(module, "minkowski", 0, "cpu", 0.3)
        mine, key = x._manager._manager, x.coordinate_map_key.key
        one, other = pair_of(streams)
        with streams.on(one):
            view = mine.grid(key).own_view()
            alone = manager.over(mine, key, CoordinateMap(view.coords, view.box))
            coarse = alone.strided(key, (2, 2, 2))
            manager.join(mine, key, alone, coarse, alone.grid(coarse).coords.clone())
        with streams.on(other):
            module.MinkowskiMaxPooling(3, 2, dimension=3)(x)
        assert other.seen[one.number] > 0


@pytest.mark.emulated
def test_a_model_that_is_replayed_and_one_that_is_not(kernel_lane, streams, fake_gpu):
    """What a replay leaves with the input, another model goes on with."""
    with apis.standin("minkowski") as module, watched(streams, fake_gpu):
        plain = apis.network(module, "minkowski", "cpu").eval()
        models = [copy.deepcopy(plain) for _ in range(2)]
        for seed in range(5):
            x, rest = apis.scene(module, "minkowski", seed, "cpu", 0.3), iter(models)
            for stream in streams.known:
                stream.synchronize()
            with settings.override(optimize="graphs"):
                found = on_both(streams, lambda x=x, rest=rest: results(next(rest), x))
            with settings.override(optimize="off", capture="off"):
                expected = results(plain, apis.scene(module, "minkowski", seed, "cpu", 0.3))
            for mine in found:
                same(mine, expected)
        assert sum(one.hits for one in graph_regions.summary()) > 0, graph_regions.summary()


@pytest.fixture
def ordered(streams, fake_gpu):
    with watched(streams, fake_gpu):
        yield streams


def reader_of(streams, keep, read):
    """Keep something on one stream, read it on another."""
    one, other = pair_of(streams)
    with streams.on(one):
        keep()
    with streams.on(other):
        found = read()
    other.synchronize()
    return found


def test_a_store(ordered):
    store = MapStore(device=torch.device("cpu"))
    made = reader_of(
        ordered, lambda: store.get("rows", lambda: torch.arange(4) * 2), lambda: store.get("rows", lambda: None).sum()
    )
    assert int(made) == 12
    with pytest.raises(Race):
        alone = MapStore()
        reader_of(ordered, lambda: alone.put("rows", torch.arange(4)), lambda: alone.peek("rows").sum())


def test_kept_values(ordered):
    kept = stream_order.StreamCache()
    reader_of(
        ordered, lambda: kept.put("rows", torch.arange(4) * 2, torch.device("cpu")), lambda: kept.get("rows").sum()
    )
    assert kept.get("columns") is None


def test_a_matrix(ordered):
    rows, x = torch.tensor([0, 1, 1]), torch.rand(3, 2)
    matrix = RowMatrix(rows, torch.arange(3), None, 2, 3)
    made = reader_of(ordered, lambda: matrix.product(x), lambda: matrix.product(x))
    assert torch.equal(made, torch.stack([x[0], x[1] + x[2]]))
    reader_of(ordered, lambda: matrix.side(True), lambda: matrix.transposed().product(made))


@pytest.mark.parametrize("name", apis.NAMES)
def test_memory_that_another_stream_reads(streams, fake_gpu, monkeypatch, name):
    """A stream that waits for maps tells the allocator: an input may go before it is through."""
    used = []
    monkeypatch.setattr(stream_order, "note_use", lambda tensor, stream: used.append((tensor, stream.number)))
    with apis.standin(name) as module, watched(streams, fake_gpu):
        model = apis.network(module, name, "cpu").eval()
        x = apis.scene(module, name, 0, "cpu", 0.3)
        one, other = pair_of(streams)
        with streams.on(one):
            results(model, x)
        used.clear()
        with streams.on(other):
            results(model, x)
    assert {number for _, number in used} == {other.number}
    assert {tensor.dtype for tensor, _ in used} & {torch.int32, torch.int64}
    assert max(tensor.numel() for tensor, _ in used) > 20
