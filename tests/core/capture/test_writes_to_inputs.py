"""Models that write to what they are given do so once in a call, as without replays."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from sparse_bridge import policy, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated

SCENES = 8
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "training": contextlib.nullcontext}


class Program(nn.Module):
    """Writes to its input, or to another tensor, in front of its layers."""

    def __init__(self, network, write):
        super().__init__()
        self.network, self.write = network, write

    def forward(self, x, other):
        framework = protocol.of(x)
        self.write(framework.features_of(x), framework.coordinates_of(x), other)
        return self.network(x)


def features(f, coords, other):
    nn.functional.silu(f, inplace=True)


def moved(f, coords, other):
    coords[:, 1].add_(1)


def moved_back(f, coords, other):
    coords[:, 1].add_(1)
    coords[:, 1].sub_(1)


def beside(f, coords, other):
    other.add_(1)


def results(device, name, how, make, mode):
    """What calls return, and what they leave of their inputs; the summaries of replays. make: of a module of layers the
    model, what is done with its input before, and what it is given beside: the structure of a tensor."""
    found = []
    with apis.standin(name) as module, settings.override(optimize=how), MODES[mode]():
        torch.manual_seed(0)
        model, before, beside = make(module)
        model = model.to(device).train(mode == "training")
        for number in range(SCENES):
            x, other = apis.scene(module, name, number, device, 0.3 + 0.002 * number), torch.zeros(3, device=device)
            x = before(x)
            framework, values = protocol.of(x), apis.values_of(model(x, beside(other)))
            if mode == "training":
                apis.loss_of(values).backward()
            found.append([*values, other, framework.features_of(x), framework.coordinates_of(x)])
        return found, graph_regions.summary()


def _same(value):
    return value


def same(device, name, make, mode):
    found = {how: results(device, name, how, make, mode) for how in ("off", "graphs")}
    for mine, theirs in zip(found["graphs"][0], found["off"][0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    return found["graphs"][1]


@pytest.mark.filterwarnings("ignore:.*outside of its grid")
@pytest.mark.usefixtures("errors_survived")  # torch refuses to write to what `inference_mode` made
@pytest.mark.parametrize(
    ("name", "mode"), [*(("spconv", mode) for mode in MODES), ("torchsparse", "no_grad"), ("minkowski", "training")]
)
@pytest.mark.parametrize("write", [features, moved, moved_back, beside], ids=lambda write: write.__name__)
def test_models_that_write_to_what_they_are_given(device, rules, name, write, mode):
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)
    make = lambda module: (Program(apis.network(module, name, device), write), _same, _same)  # noqa: E731
    whole = next(one for one in same(device, name, make, mode) if one.name == "Program")
    assert whole.hits == 0


class Part(nn.Module):
    """Begins with an activation in place."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers.sequence(layers.conv(8, 8, "p"), layers.norm(8), layers.conv(8, 8, "p"))

    def forward(self, x, other):
        nn.functional.silu(protocol.of(x).features_of(x), inplace=True)
        other[0].add_(1)
        other[1]["calls"].add_(1)
        y = self.layers(x)
        return {"out": y, "deep": y}


@pytest.mark.parametrize("mode", ["no_grad", "training"])
@pytest.mark.parametrize("name", apis.NAMES)
def test_a_part_behind_levels_that_writes_to_its_input(device, rules, name, mode):
    """Which kernel maps it asks for of its own input shows when it computes once more."""
    rules.hold(graphs_of(512, watched=True))
    rules.set(policy, LEAST_LAYERS=2)

    def make(module):
        layers = apis.Layers(module, name)
        stem = layers.sequence(layers.conv(4, 8, "s"), layers.down(8, 8, "d")).to(device)

        def before(x):
            with torch.no_grad(), settings.override(optimize="off"):
                return stem(x)

        return Part(layers), before, lambda other: [other, {"calls": other[:1]}]

    assert all(one.hits == 0 for one in same(device, name, make, mode) if one.name == "Part")
