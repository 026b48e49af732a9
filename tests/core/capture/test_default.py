"""What is replayed where a program asks for nothing."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import weakref

import pytest
import torch

import sparse_bridge
from sparse_bridge import log, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_capture, graph_regions
from sparse_bridge.core.device import expandable_segments, rocm

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated


class Told(apis.Network):
    """A network that tells how often it was called."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


@pytest.fixture
def spconv(device):
    with apis.standin("spconv") as module, settings.override(optimize=settings.Settings().optimize):
        yield module


def run(module, model, plain, device, seeds, trains=False):
    """Calls of a model and of its double, which give the same."""
    for seed in seeds:
        given = lambda seed=seed: apis.scene(module, "spconv", seed, device, 0.3 + 0.002 * seed)  # noqa: E731
        apis.both(model, plain, given, trains, mode=settings.get().optimize)


def hits():
    return sum(one.hits for one in graph_regions.summary())


@pytest.mark.parametrize("mode", ["auto", "inference"])
def test_inference_and_training_steps(spconv, device, mode):
    """By default both are replayed, in turns."""
    assert settings.get().optimize == "auto"
    plain = apis.network(spconv, "spconv", device).eval()
    model = copy.deepcopy(plain)
    with settings.override(optimize=mode):
        run(spconv, model, plain, device, range(10))
        served = hits()
        assert served > 2
        for one in (model, plain):
            one.train()
        run(spconv, model, plain, device, range(10, 20), trains=True)
        training = graph_regions.region_of(model).replayer.training
        assert training.hits == hits() - served and (training.hits > 0) == (mode == "auto") == bool(training.kinds)
        for one in (model, plain):
            one.eval()
        run(spconv, model, plain, device, range(20, 24))
        assert hits() > served + training.hits, "the weights are others now, in the same places"


def test_a_program_that_only_trains(spconv, device):
    plain = apis.network(spconv, "spconv", device)
    model = copy.deepcopy(plain)
    with settings.override(optimize="inference"):
        run(spconv, model, plain, device, range(6), trains=True)
    assert graph_regions.summary() == []
    run(spconv, model, plain, device, range(6, 16), trains=True)
    assert hits() > 2 and not graph_regions.region_of(model).replayer.kinds


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("name", apis.NAMES)
def test_scenes_made_in_inference_mode(device, name):
    """Nobody sees whether these coordinates are written to, so that torchsparse's layers share no maps there."""
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        plain = apis.network(module, name, device).eval()
        model = copy.deepcopy(plain)
        with torch.inference_mode():
            for seed in range(7):
                given = functools.partial(apis.scene, module, name, seed, device, 0.3 + 0.002 * seed)
                apis.both(model, plain, given, mode="graphs")
        assert hits() > 2


@pytest.mark.parametrize(
    ("mode", "level"), [("auto", logging.INFO), ("inference", logging.INFO), ("graphs", logging.WARNING)]
)
def test_reasons_are_warnings_only_for_those_who_asked(spconv, device, rules, caplog, mode, level):
    rules.hold(graphs_of(512, watched=True))
    log.reset()
    plain = Told(apis.Layers(spconv, "spconv")).to(device).eval()
    model = copy.deepcopy(plain)
    caplog.set_level(logging.DEBUG, "sparse_bridge")
    with settings.override(optimize=mode):
        run(spconv, model, plain, device, range(6))
    said = [record for record in caplog.records if "is not replayed from a graph" in record.getMessage()]
    assert [(record.levelno, "GRAPH_WRITES_STATE" in record.getMessage()) for record in said] == [(level, True)]


@pytest.mark.parametrize("mode", ["auto", "graphs"])
def test_a_difference_is_a_warning_for_all(spconv, device, rules, caplog, mode):
    rules.hold(graphs_of(512))
    log.reset()
    plain = apis.network(spconv, "spconv", device).eval()
    model = copy.deepcopy(plain)
    with settings.override(optimize=mode, compare_every=1):
        run(spconv, model, plain, device, range(5))
        (graph,) = graph_regions.region_of(model).replayer.graphs
        graph.graph.replay = lambda: None  # as if its kernels wrote elsewhere
        run(spconv, model, plain, device, range(5, 7))
    (record,) = [one for one in caplog.records if "GRAPH_DIFFERS" in one.getMessage()]
    assert record.levelno == logging.WARNING and graph_regions.region_of(model) is None


class Stepwise(torch.nn.Module):
    """A program that makes its sparse tensor itself."""

    def __init__(self, network, make):
        super().__init__()
        self.stem, self.body, self.make = network.stem, network, make

    def forward(self, values, coords):
        x = self.stem(self.make(coords, values))
        y = self.body.deep(self.body.down(x))
        return {"out": self.body.head(self.body.cat(self.body.up(y), x)), "deep": y}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", ["takes", "makes", "asked"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_who_drops_a_model_has_its_memory_back_at_once(device, rules, name, kind, trains):
    """As without: nobody waits for the garbage collector."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        model = apis.network(module, name, device)
        if kind == "makes":
            model = Stepwise(model, lambda coords, values: apis.tensor(module, name, coords, values))
        model.to(device).train(trains)
        if kind == "asked":
            sparse_bridge.optimize(model, graphs=True)
        for seed in range(6):
            x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed)
            framework = protocol.of(x)
            given = (framework.features_of(x), framework.coordinates_of(x)) if kind == "makes" else (x,)
            with torch.set_grad_enabled(trains):
                found = apis.values_of(model(*given))
            if trains and seed < 5:
                apis.loss_of(found).backward()
        modes = [one for _, region in graph_regions.tried() for one in (region, region.training)]
        graphs = [weakref.ref(graph) for one in modes if one is not None for graph in getattr(one, "graphs", ())]
        gone = weakref.ref(model)
        assert graphs and all(one() is not None for one in graphs)
        del x, framework, given, modes
        gc.collect()
        gc.disable()
        try:
            del model
            if trains:
                assert gone() is not None, "the last step keeps it"
                apis.loss_of(found).backward()
            del found
            assert gone() is None
            if device != "cpu" or not trains:  # an imitated backward pass keeps its graph
                assert not any(one() for one in graphs)
            assert graph_regions.summary() == []
        finally:
            gc.enable()


def held():
    """Bytes of all tensors that Python knows of."""
    return sum(one.numel() * one.element_size() for one in gc.get_objects() if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("every", [0, 1], ids=["replayed", "compared"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_a_scene_goes_with_the_last_reference_to_it(device, rules, name, every, trains):
    """Comparisons keep nothing in cycles either, which the garbage collector would have to find."""
    if name == "torchsparse" and not every:
        pytest.skip("its results share their maps with the input, and maps that can be made later keep the input")
    rules.hold(graphs_of(512, watched=True))
    with apis.standin(name) as module, settings.override(optimize="graphs", compare_every=every):
        model = apis.network(module, name, device).train(trains)
        scene = functools.partial(apis.scene, module, name, 0, device, 0.3)

        def call():
            with torch.set_grad_enabled(trains):
                found = apis.values_of(model(scene()))
            if trains:
                apis.loss_of(found).backward()

        for _ in range(5):
            call()
        assert bool(hits()) != bool(every)
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(4):
                call()
            assert held() <= before
        finally:
            gc.enable()


def test_rocm_replays_only_where_it_is_asked_to(monkeypatch):
    """The default must not even look for what could be replayed there: that would log."""
    monkeypatch.setattr(rocm.torch.version, "hip", "7.2", raising=False)
    with torch.no_grad():
        assert not graph_regions.enabled()
        for mode in ("auto", "inference"):
            with settings.override(optimize=mode, capture="always"):
                assert graph_regions.enabled()
            with settings.override(optimize=mode):
                assert not graph_regions.enabled()
        with settings.override(optimize="graphs"):
            assert graph_regions.enabled(), "which says why nothing is replayed"


class TestExpandableSegments:
    @pytest.fixture
    def allocator(self, monkeypatch):
        """What torch's allocator was told, and what a device has."""
        told, said = [], {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(expandable_segments, "set_allocator", told.append)
        monkeypatch.setattr(expandable_segments, "has_virtual_memory", lambda device: device == 0)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": said})
        return told, said

    @pytest.mark.parametrize("text", ["", "expandable_segments:False", "max_split_size_mb:128", None])
    def test_only_an_allocator_that_nobody_configured(self, allocator, text):
        _, said = allocator
        said["PYTORCH_CUDA_ALLOC_CONF"] = text
        if text is None:
            said.clear()
        assert expandable_segments.possible(0) == (text in ("", "expandable_segments:False"))
        assert not expandable_segments.possible(1)

    def test_rocm_and_old_drivers_have_none(self, allocator, monkeypatch):
        monkeypatch.setattr(torch.version, "hip", "7.2")
        assert not expandable_segments.possible(0)
        monkeypatch.undo()
        expandable_segments.has_virtual_memory.cache_clear()
        monkeypatch.setattr(expandable_segments.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
        assert not expandable_segments.has_virtual_memory(0)
        expandable_segments.has_virtual_memory.cache_clear()

    def test_they_are_on_during_captures_alone(self, allocator):
        told, _ = allocator
        captures = graph_capture.Captures()
        captures.begin()
        captures.end()
        assert told == []
        captures.expandable = True
        captures.begin()
        captures.begin()  # another thread's
        captures.expandable = False  # as another model's device has none
        captures.end()
        assert told == ["expandable_segments:True"]
        captures.end()
        assert told == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.gpu
def test_a_graph_takes_one_range_of_addresses():
    """Where the allocator is as it comes, what a capture takes is expandable, and ordinary again afterwards."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not expandable_segments.possible(device.index):
        pytest.skip("this allocator, or driver, has none")
    memory = graph_capture.GraphMemory(device)
    x = torch.zeros(1 << 20, device=device)
    others = {one["address"] for one in torch.cuda.memory_snapshot() if one["is_expandable"]}  # of other threads' work

    def work():
        return [x + 1, torch.cat([x, x]) + 2]

    work()
    with torch.cuda.stream(memory.stream):
        graph, made = graph_capture.captured(work, memory.pool)
    graph.replay()
    torch.cuda.synchronize()
    assert float(made[0].sum()) == len(x) and float(made[1].min()) == 2
    after = torch.zeros(1 << 28, device=device)  # which no segment has room for
    segments = torch.cuda.memory_snapshot()
    own = [one for one in segments if tuple(one["segment_pool_id"]) == tuple(memory.pool)]
    assert own and all(one["is_expandable"] for one in own)
    new = [one for one in segments if one["is_expandable"] and one["address"] not in others and one not in own]
    # Beside it torch keeps the seed and the offset of random numbers for its first graph, in the smallest blocks.
    assert sum(one["allocated_size"] for one in new) <= 2 * 512
    del after
