"""Maps replayed from captured graphs are the maps that would have been built one by one."""

from __future__ import annotations

import threading

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.capture import arena, captured_maps, graph_cache, prefetch
from tests.clouds import cloud

from .pretended import graphs_on_the_cpu
from .test_prefetch import (
    PAIR,
    SHAPE,
    Scene,
    counted,  # noqa: F401
    features,
)

pytestmark = pytest.mark.emulated

UNTIL_CAPTURED = 5  # two scenes make a history, three prefetched alike are enough


DEVICE = [""]


@pytest.fixture(autouse=True)
def fresh(kernel_lane, monkeypatch, counted):  # noqa: F811
    """Real graphs on a GPU, pretended ones where kernels are emulated."""
    DEVICE[0] = kernel_lane.device
    prefetch.forget()
    monkeypatch.setattr(graph_cache, "_RECURS", 3)
    monkeypatch.setattr(graph_cache, "_BETWEEN", 0)
    if kernel_lane.device == "cpu":
        graphs_on_the_cpu(monkeypatch)
    with settings.override(capture="graphs", tune="off"):
        yield
    prefetch.forget()


@pytest.fixture
def streams(kernel_lane):
    if kernel_lane.device == "cpu":
        pytest.skip("a CPU has no streams")


def scene(seed, share=0.2, **kwargs):
    return Scene(cloud(SHAPE, share=share, seed=seed, device=DEVICE[0], **kwargs))


def graphs():
    (history,) = prefetch._histories.values()
    (found,) = history.graphs.values()
    return found


def captured(share=0.2, **kwargs):
    """The graphs of a grid, with one in them."""
    for seed in range(UNTIL_CAPTURED):
        scene(seed, share, **kwargs).network()
    assert len(graphs().graphs) == 1
    return graphs()


@pytest.mark.parametrize("capture, n_graphs", [("graphs", 0), ("always", 1)])
def test_on_rocm_maps_are_replayed_only_if_the_settings_say_so(monkeypatch, capture, n_graphs):
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    with settings.override(capture=capture):
        for seed in range(UNTIL_CAPTURED + 3):
            scene(seed).network()
    owners = [
        owner for history in prefetch._histories.values() for owner in history.graphs.values()
    ]
    assert sum(len(owner.graphs) for owner in owners) == n_graphs


@pytest.fixture
def replays(monkeypatch):
    """How often a graph answered."""
    found = []
    answers = graph_cache._MapGraph.answers

    def answer(self, *args):
        found.append(answers(self, *args))
        return found[-1]

    monkeypatch.setattr(graph_cache._MapGraph, "answers", answer)
    return found


def test_scenes_of_other_sizes(replays):
    captured()
    for seed, share in ((11, 0.2), (12, 0.19), (13, 0.205), (14, 0.12)):
        assert scene(seed, share).network() == 0  # which compares every map
    assert scene(15, empty_items=(1,)).network() == 0
    assert len(replays) == 5 and None not in replays


def test_maps_outlive_later_replays(replays):
    captured()
    first = scene(21)
    kmap = first.submanifold(first.root)
    half, down = first.strided(first.root)
    first.submanifold(half)
    first.submanifold(half, PAIR)
    first.strided(half, offsets=PAIR)
    x = features(kmap.n_in, 8, seed=1).mul(4).round().to(DEVICE[0])
    weight = features(27 * 8, 16, seed=3).mul(4).round().view(27, 8, 16).to(DEVICE[0])
    before = [functional.conv(x, weight, None, one) for one in (kmap, down)]
    coords = half[0].coords.clone()
    for seed in (22, 23):
        scene(seed).network()
    assert len(replays) == 3
    after = [functional.conv(x, weight, None, one) for one in (kmap, down)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert torch.equal(coords, half[0].coords)


@pytest.mark.parametrize("spoil", ["equal", "outside"])
def test_equal_and_outlying_rows(replays, spoil):
    captured()
    coords = cloud(SHAPE, share=0.2, seed=31)
    coords[5] = coords[9] if spoil == "equal" else torch.tensor([0, 0, 10, 0], dtype=torch.int32)
    assert Scene(coords.to(DEVICE[0])).network() == 5
    assert replays == [None]


def test_a_scene_that_outgrows_the_graph(replays):
    """As many rows, in far more cells of the next level."""
    captured(share=0.9)
    shape = (24, 20, 28)
    sparse = cloud(shape, share=0.111, seed=41, device=DEVICE[0])[:3000].contiguous()
    assert Scene(sparse, shape=shape).network() == 5
    assert replays == [None]


def test_graphs_that_serve_nobody_are_dropped(replays, monkeypatch):
    held = captured()
    monkeypatch.setattr(next(iter(held.graphs.values())).maps, "rows", lambda *_: None)
    for left in (1, 1, 0):  # graphs after each
        assert scene(42).network() == 0  # queued instead
        assert replays[-1] is None and len(held.graphs) == left
    for _ in range(UNTIL_CAPTURED + (1 << held.refusals)):  # after a rest
        scene(43).network()
    assert len(held.graphs) == 1 and replays[-1] is not None


def test_streams_and_inference_mode(streams, replays):
    with torch.inference_mode():
        captured()
    assert scene(51).network() == 0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert scene(52).network() == 0
    torch.cuda.current_stream().wait_stream(side)
    assert scene(53).network() == 0
    with torch.inference_mode():
        assert scene(54).network() == 0
    assert len(replays) == 4 and None not in replays


def test_the_switch(replays):
    captured()
    with settings.override(capture="prefetch"):
        assert scene(61).network() == 0
    assert not replays


def test_a_capture_that_fails(monkeypatch, replays):
    def fail(*args):
        raise RuntimeError("this allocator cannot")

    monkeypatch.setattr(captured_maps, "captured", fail)
    for seed in range(UNTIL_CAPTURED + 4):
        built = scene(seed).network()
    assert built == 0 and not graphs().graphs and not replays


def test_a_full_memory_gives_the_graphs_back(monkeypatch):
    held = captured()

    def full(self, *args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(graph_cache._MapGraph, "answers", full)
    assert scene(71).network() == 5
    assert not held.graphs


def test_threads(streams):
    """Scenes of several threads take turns."""
    captured()
    failures = []

    def work(thread):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for turn in range(4):
                    here = scene(100 + 10 * thread + turn)
                    here.submanifold(here.root)  # which compares it
            stream.synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_scenes_of_other_shapes(replays):
    """What is captured over one shape serves others; keys of 64 bits serve those of 32, too."""

    def network(seed, shape, scale=1):
        coords = cloud(shape, share=0.2, seed=seed, device=DEVICE[0])[:672].contiguous()
        return Scene(coords, shape=[scale * axis for axis in shape]).network()

    for seed, shape in enumerate([(30, 9, 9), (10, 14, 20), (12, 12, 15), (9, 40, 8), (16, 16, 9)]):
        built = network(seed, shape)
    assert built == 0 and len(graphs().graphs) == 1
    for seed, shape in enumerate([(17, 11, 13), (64, 7, 7)]):
        assert network(10 + seed, shape) == 0
    assert len(replays) == 2 and None not in replays
    for seed in range(3):  # wider keys than the graph has
        assert network(20 + seed, (13, 13, 13), 300) == 0
    assert len(replays) == 2 and graphs().captures == 2
    for scale in (1, 300):
        assert network(30 + scale, (15, 12, 13), scale) == 0
    assert len(replays) == 4 and None not in replays


@pytest.mark.parametrize("most, tried", [(5000, 0), (500_000, 1)])
def test_scenes_that_are_too_large(replays, monkeypatch, most, tried):
    """Those that are by far are not tried."""
    monkeypatch.setattr(arena, "MOST_BYTES", most)
    for seed in range(UNTIL_CAPTURED + 3):
        built = scene(seed).network()
    assert built == 0 and not graphs().graphs and not replays and graphs().captures == tried


def test_a_larger_class(replays):
    """The arena grows; what was captured over the smaller one is captured anew."""
    held = captured(0.12)
    for seed in range(3):
        assert scene(90 + seed, 0.9).network() == 0
    assert list(held.graphs) == [3072] and not replays
    for seed in range(3):
        assert scene(95 + seed, 0.12).network() == 0
        assert scene(98 + seed, 0.9).network() == 0
    assert len(held.graphs) == 2 and None not in replays and len(replays) == 3


def test_a_single_map(replays):
    """Nothing would wait for the device twice, but the host has a dozen launches less."""

    def lone(seed):
        here = scene(seed)
        here.submanifold(here.root)
        return here.built

    assert [lone(seed) for seed in range(UNTIL_CAPTURED + 3)][-3:] == [0, 0, 0]
    assert len(replays) == 3 and None not in replays
