"""Maps replayed from captured graphs are the maps that would have been built one by one."""

from __future__ import annotations

import threading

import pytest
import torch

from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.capture import captured_maps, graph_cache, prefetch
from tests.clouds import cloud

from .pretended import graphs_on_the_cpu
from .test_prefetch import (
    HALF,
    PAIR,
    QUARTER,
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
    (history,) = [one for one in prefetch._histories.values() if one.alike]  # of one grid
    return history.graphs


def captured(share=0.2, **kwargs):
    """The graphs of a grid, with one in them."""
    for seed in range(UNTIL_CAPTURED):
        scene(seed, share, **kwargs).network()
    assert len(graphs().graphs) == 1
    return graphs()


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
    half, down = first.strided(first.root, HALF)
    first.submanifold(half)
    first.submanifold(half, PAIR)
    first.strided(half, QUARTER, PAIR)
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
    """Few rows, in nearly all cells of the next level."""
    captured(share=0.9)
    sparse = cloud(SHAPE, share=0.9, seed=41, device=DEVICE[0])[::7].contiguous()
    assert Scene(sparse).network() in (0, 5)  # which compares every map
    assert len(replays) == 1


def test_graphs_that_serve_nobody_are_dropped(replays, monkeypatch):
    held = captured()
    monkeypatch.setattr(held.graphs[0].maps, "rows", lambda n_rows: None)
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


def test_a_single_map(replays):
    """Nothing would wait for the device twice, but the host has a dozen launches less."""

    def lone(seed):
        here = scene(seed)
        here.submanifold(here.root)
        return here.built

    assert [lone(seed) for seed in range(UNTIL_CAPTURED + 3)][-3:] == [0, 0, 0]
    assert len(replays) == 3 and None not in replays
