"""Maps of a replayed model that are queued when its input is made."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import sparse_bridge
from sparse_bridge.core.capture import captured_maps
from sparse_bridge.core.prefetch import prefetch
from tests.core.capture.graph_sizes import graphs_of

from . import apis
from .pretended import replays_on_the_cpu

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("nothing_learnt")]


class Api:
    """A replayed network of MinkowskiEngine's API, and the same one that is not."""

    def __init__(self, module, lane):
        self.module, self.device = module, lane.device
        self.plain = apis.network(module, "minkowski", lane.device).eval()
        self.model = sparse_bridge.optimize(copy.deepcopy(self.plain), graphs=True)

    def scene(self, seed, share=0.3):
        return apis.scene(self.module, "minkowski", seed, self.device, share)

    def check(self, *given):
        """The replayed network computes of tensors, made one after another, what the other does of
        tensors like them."""
        for x in given:
            found = self.model(x)
            expected = self.plain(self.module.SparseTensor(x.F.clone(), x.C.clone()))
            for key in ("out", "deep"):
                torch.testing.assert_close(found[key].F, expected[key].F, rtol=2e-3, atol=1e-3)
                assert torch.equal(found[key].C, expected[key].C)

    @property
    def hits(self):
        return self.model.__dict__["forward"].hits


@pytest.fixture
def told():
    return []


@pytest.fixture
def api(kernel_lane, fake_gpu, rules, monkeypatch, told):
    """told: of a graph's maps that are started, and of inputs that get maps of their own."""
    if kernel_lane.device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))
    own_start, own_maps = captured_maps.CapturedMaps.start, prefetch.announced
    monkeypatch.setattr(captured_maps.CapturedMaps, "start", lambda *given: told.append("maps") or own_start(*given))
    monkeypatch.setattr(prefetch, "announced", lambda *given: told.append("own") or own_maps(*given))
    with apis.standin("minkowski") as module, torch.no_grad():
        made = Api(module, kernel_lane)
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
