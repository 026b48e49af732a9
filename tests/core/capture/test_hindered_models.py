"""Models whose calls something stands against: parts of them are replayed, and they are where it goes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.core.capture.refused_modules import RefusedModules
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

LIMIT = policy.HINDERED.failures


class Distilled(nn.Module):
    """A teacher without gradients and a student, in one module that trains."""

    def __init__(self, make, network):
        super().__init__()
        self.make, self.student, self.teacher = make, network, copy.deepcopy(network).requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, values, coords):
        with torch.no_grad():
            wanted = protocol.features_of(self.teacher(self.make(coords, values))["out"])
        return protocol.features_of(self.student(self.make(coords, values))["out"]) - wanted


class Frozen(nn.Module):
    """A backbone that is not trained, and a head that is."""

    def __init__(self, make, network):
        super().__init__()
        self.make, self.backbone, self.head = make, network, nn.Linear(4, 4)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, values, coords):
        with torch.no_grad():
            found = self.backbone(self.make(coords, values))
        return self.head(protocol.features_of(found["out"]))


class Evaluated(Frozen):
    """The same, with layers that do the same in training."""

    def train(self, mode=True):
        return nn.Module.train(self, False)


def steps(module, name, model, plain, device, seeds, trains=True):
    """Calls of a model, and of its double without replays, which give the same."""
    for seed in seeds:
        x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed)
        given = protocol.features_of(x), protocol.of(x).coordinates_of(x)
        apis.both(model, plain, lambda given=given: given, trains, lambda out: [out], "auto")


def made(module, name, device, kind):
    """A model and its double."""
    network = apis.network(module, name, device)
    model = kind(lambda coords, values: apis.tensor(module, name, coords, values), network).to(device).train()
    return model, copy.deepcopy(model)


def served():
    """Calls that were replayed, of each model that is still served."""
    return sorted(region.summary().hits for _, region in graph_regions.tried() if not isinstance(region, str))


@pytest.mark.emulated
@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("kind", [Distilled, Frozen, Evaluated])
def test_a_part_without_gradients_of_a_model_that_trains(device, rules, name, kind):
    rules.hold(graphs_of(512, watched=True))
    with apis.standin(name) as module:
        model, plain = made(module, name, device, kind)
        steps(module, name, model, plain, device, range(LIMIT + 12))
        parts = served()
        assert len(parts) == (2 if kind is Distilled else 1) and min(parts) >= 7
        (reason,) = {one.reason for one in graph_regions.summary() if one.name == kind.__name__}
        assert Why.GRAPH_OTHER_MODE.name in reason


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["spconv", "minkowski"])
def test_a_model_that_was_replayed_without_gradients_before_it_trains(device, rules, name):
    """Its graphs go when more steps have come than it has replayed calls; those of its part serve both."""
    rules.hold(graphs_of(512, watched=True))
    with apis.standin(name) as module:
        model, plain = made(module, name, device, Frozen)
        for one in (model, plain):
            nn.Module.train(one, False)
        steps(module, name, model, plain, device, range(12), trains=False)
        assert graph_regions.region_of(model).replayer.hits == 8
        for one in (model, plain):
            one.train()
        steps(module, name, model, plain, device, range(20))
        assert graph_regions.region_of(model) is None and served()[0] >= 5


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["spconv", "torchsparse"])
@pytest.mark.parametrize("where", ["at times", "always", "first"])
def test_hooks_that_come_and_go(device, rules, name, where):
    """Single calls do not end replays. Where a hook stays, parts without it are replayed; where all have some, the
    whole is tried again."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=1)
    with apis.standin(name) as module, settings.override(optimize="auto"), torch.no_grad():
        model = apis.network(module, name, device).eval()
        for seed in range(60):
            hooked = {"at times": seed % 3 == 2, "always": True, "first": seed < 20}[where]
            inner = [one for one in model.modules() if one is not model] if where == "first" else [model.deep]
            handles = [one.register_forward_hook(lambda *_: None) for one in inner if hooked]
            model(apis.scene(module, name, seed % 9, device, 0.3))
            for handle in handles:
                handle.remove()
        region = graph_regions.region_of(model)
        if where == "always":
            assert region is None and any(hits > 20 for hits in served())
        else:
            assert region.replayer.hits >= (30 if where == "at times" else 5)


def test_a_model_that_trains_in_calls_without_gradients_is_tried_again(rules):
    """Less and less often, and not while a part of it is served."""
    refused, model = RefusedModules(), nn.Sequential(nn.Linear(1, 1))
    refused.refuse(model[0], "for good", False)
    assert not any(refused.may_be_tried(model[0], {}) for _ in range(5000))
    refused.exhaust([model, model[0]])
    assert refused.exhausted(model[0])
    tries = []
    for number in range(3000):
        if refused.may_be_tried(model, {}):
            tries.append(number)
            refused.refuse(model, "hooks", True)
            refused.exhaust([model, model[0]])
            assert not refused.exhausted(model[0])
    assert len(tries) == 11 and not any(refused.may_be_tried(model, {model[0]: 1}) for _ in range(5000))
    assert refused.may_be_tried(model, {})
