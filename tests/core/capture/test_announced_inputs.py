"""Maps of a replayed model that are queued when its input is made."""

from __future__ import annotations

import gc

import pytest
import torch

from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import captured_maps, graph_regions
from sparse_bridge.core.capture.graphed_module import GraphedModule
from sparse_bridge.core.prefetch import prefetch

from . import apis
from .test_replay_apis import optimized

pytestmark = pytest.mark.emulated


class Api:
    """A replayed network of MinkowskiEngine's API, and the same one that is not."""

    def __init__(self, module, device):
        self.module, self.device = module, device
        self.model, self.plain = optimized(module, "minkowski", device, False)

    def scene(self, seed, share=0.3):
        return apis.scene(self.module, "minkowski", seed, self.device, share)

    def check(self, *given):
        """The replayed network computes of tensors, made one after another, what the other does of
        tensors like them."""
        for x in given:
            inputs = iter((lambda: x, lambda: self.module.SparseTensor(x.F.clone(), x.C.clone())))  # noqa: B023
            found = apis.both(self.model, self.plain, lambda: next(inputs)(), rtol=2e-3, atol=1e-3)  # noqa: B023
            apis.same_places(*(out for _, out in found))

    @property
    def hits(self):
        return graph_regions.region_of(self.model).replayer.hits


@pytest.fixture
def told():
    return []


@pytest.fixture
def api(device, monkeypatch, told):
    """told: of a graph's maps that are started, and of inputs that get maps of their own."""
    own_start, own_maps = captured_maps.CapturedMaps.start, prefetch.announced
    monkeypatch.setattr(captured_maps.CapturedMaps, "start", lambda *given: told.append("maps") or own_start(*given))
    monkeypatch.setattr(prefetch, "announced", lambda *given: told.append("own") or own_maps(*given))
    with apis.standin("minkowski") as module, torch.no_grad():
        made = Api(module, device)
        for seed in range(6):
            made.check(made.scene(seed))
        assert made.hits
        yield made


def test_they_are_there_when_the_model_is_called(api, told):
    """Nothing else is asked to look for equal rows, and nothing is queued twice."""
    for seed in range(6, 9):
        hits = api.hits
        told.clear()
        x = api.scene(seed)
        assert told == ["maps"]
        assert "out" in api.model(x) and told == ["maps"] and api.hits == hits + 1
    api.check(api.scene(9), api.scene(10))


def test_tensors_that_are_made_ahead(api, told):
    """Only the last one's maps are there; whoever makes several is not helped any longer."""
    scenes = [api.scene(seed) for seed in range(6, 12)]
    api.check(*scenes)
    api.check(*[api.scene(seed) for seed in range(12, 18)][::-1])
    told.clear()
    api.scene(18)
    assert told[0] == "own"


def test_equal_rows(api):
    x = api.scene(6)
    rows = torch.cat([x.C, x.C[:3]])
    values = torch.cat([x.F, x.F[:3] + 1])
    merged = api.module.SparseTensor(values, rows)
    assert merged.F.shape == x.F.shape and torch.equal(merged.C, x.C)
    api.check(api.scene(7), api.scene(8))


def test_other_inputs_between(api):
    """Another model's input, and one for which no graph has room."""
    x = api.scene(6)
    large = api.scene(7, share=0.9)
    api.plain(api.scene(8))
    api.check(x, large)


def test_a_model_that_is_gone(api, told):
    del api.model
    gc.collect()
    told.clear()
    assert api.scene(6).F.shape[1] == 4 and told[0] == "own"


@pytest.mark.parametrize("name", apis.NAMES)
def test_a_call_that_is_interrupted(device, monkeypatch, name):
    """Where it waits for what it has queued early, as by Ctrl-C: the next one has maps of its own."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with apis.standin(name) as module:
        model, plain = optimized(module, name, device, False)
        scenes = [apis.scene(module, name, seed, device, 0.4) for seed in range(10)]
        rows = min(len(protocol.features_of(x)) for x in scenes)

        def given(seed):
            x = scenes[seed]
            coords, values = protocol.of(x).coordinates_of(x), protocol.features_of(x)
            few = torch.cat([coords[: rows - 1], coords[-1:]]).clone(), torch.cat([values[: rows - 1], values[-1:]])
            return lambda: apis.tensor(module, name, *few)

        for seed in range(6):
            apis.both(model, plain, given(seed))
        place = (GraphedModule, "launch_speculatively") if name == "spconv" else (captured_maps.CapturedMaps, "learn")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), torch.no_grad():
            patch.setattr(*place, interrupt)
            model(given(6)())
        hits = graph_regions.region_of(model).replayer.hits
        for seed in range(7, 10):
            apis.same_places(*(out for _, out in apis.both(model, plain, given(seed))))
        assert graph_regions.region_of(model).replayer.hits > hits
