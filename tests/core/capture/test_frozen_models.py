"""Models of which nothing is trained, called where gradients are recorded: they are replayed as without."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions
from sparse_bridge.refusals import Why

from . import apis
from .graph_sizes import graphs_of

pytestmark = pytest.mark.emulated


def frozen_pair(module, name, device, around=lambda network: network):
    """A frozen model that may be replayed, and its double."""
    plain = around(apis.network(module, name, device)).eval().requires_grad_(False)
    return sparse_bridge.optimize(copy.deepcopy(plain), graphs=True), plain


def hits(model):
    found = graph_regions.region_of(model)
    return 0 if found is None else found.replayer.hits + found.replayer.training.hits


def values_of(model, x):
    """Features of a network's outputs, of which it is equal whether they require a gradient."""
    found = apis.values_of(model(x))
    return [one.detach() for one in found], [one.requires_grad for one in found]


@pytest.mark.parametrize("name", apis.NAMES)
def test_one_graph_for_all_calls_with_gradients_recorded(device, rules, name):
    """It has the bits of the layers; calls without gradients have a graph of their own."""
    rules.hold(graphs_of(64, watched=True))
    with apis.standin(name) as module:
        model, plain = frozen_pair(module, name, device)
        for seed in range(24):
            given = functools.partial(apis.scene, module, name, seed, device, 0.2 + 0.01 * (seed % 5))
            with torch.set_grad_enabled(seed < 12):
                (mine, wants), (theirs, _) = values_of(model, given()), values_of(plain, given())
            assert not any(wants)
            assert all(map(torch.equal, mine, theirs))
            if seed == 11:
                before = hits(model)
                assert before >= 5
        assert hits(model) >= before + 5
        assert len(graph_regions.region_of(model).replayer.graphs) == 2


@pytest.mark.parametrize("name", apis.NAMES)
def test_a_head_that_is_trained_on_a_frozen_backbone(device, rules, name):
    """Steps of the head's are those on the layers, and the backbone trains from where it is no longer frozen."""
    rules.hold(graphs_of(64, watched=True))
    with apis.standin(name) as module:
        pair = frozen_pair(module, name, device)
        torch.manual_seed(1)
        heads = [nn.Linear(4, 3).to(device)]
        heads.append(copy.deepcopy(heads[0]))
        replayed = 0
        for seed in range(16):
            if seed == 12:
                replayed = hits(pair[0])
                for one in pair:
                    one.requires_grad_(True)
            for one, head in zip(pair, heads, strict=True):
                one.zero_grad()
                head.zero_grad()
                x = apis.scene(module, name, seed, device)
                head(protocol.features_of(one(x)["out"])).square().sum().backward()
            apis.same_gradients(*heads)
            apis.same_gradients(*pair)
            assert (next(pair[0].parameters()).grad is None) == (seed < 12)
        assert replayed >= 4


class Adapted(nn.Module):
    """A linear layer, and a product of two small matrices beside it that is trained."""

    def __init__(self, linear, width):
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, linear.out_features, bias=False)
        nn.init.constant_(self.up.weight, 0.1)

    def forward(self, values):
        return self.linear(values) + self.up(self.down(values))


class WithLinear(nn.Module):
    def __init__(self, network, device):
        super().__init__()
        self.network, self.linear = network, nn.Linear(4, 4).to(device)

    def forward(self, x):
        found = self.network(x)
        values = self.linear(protocol.features_of(found["out"]))
        found["out"] = protocol.of(found["out"]).with_features(found["out"], values)
        return found


def test_adapters_that_are_added_later_are_trained(device, rules):
    """To a frozen model that was replayed where gradients are recorded."""
    rules.hold(graphs_of(64, watched=True))
    with apis.standin("spconv") as module:
        torch.manual_seed(0)
        pair = frozen_pair(module, "spconv", device, lambda network: WithLinear(network, device))
        for seed in range(26):
            if seed == 12:
                assert hits(pair[0]) >= 4
                for one in pair:
                    torch.manual_seed(1)
                    one.linear = Adapted(one.linear, 4).to(device).eval()
            for one in pair:
                one.zero_grad()
                found = apis.values_of(one(apis.scene(module, "spconv", seed, device)))
                assert [value.requires_grad for value in found] == [seed >= 12, False]
                if seed >= 12:
                    found[0].square().sum().backward()
            if seed >= 12:
                assert pair[0].linear.up.weight.grad is not None
                apis.same_gradients(*pair)
        assert graph_regions.region_of(pair[0]).replayer.training.hits >= 4


def test_features_that_require_a_gradient(device, rules):
    """They get it, among scenes that ask for none."""
    rules.hold(graphs_of(64, watched=True))
    with apis.standin("spconv") as module:
        model, plain = frozen_pair(module, "spconv", device)
        for seed in range(24):
            gradients = []
            for one in (model, plain):
                x = apis.scene(module, "spconv", seed, device)
                x.features.requires_grad_(seed % 2 > 0)
                found = apis.values_of(one(x))
                assert [value.requires_grad for value in found] == [bool(seed % 2)] * len(found)
                if seed % 2:
                    apis.loss_of(found).backward()
                    gradients.append(x.features.grad)
            if gradients:
                torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
        region = graph_regions.region_of(model).replayer
        assert region.hits >= 4 and region.training.hits >= 4


recorded = functools.partial(torch.is_grad_enabled)


class Asks(nn.Module):
    """Computes something else where gradients are recorded.

    way: "scale": by a factor. "leaf": with a tensor that it makes, and that requires a gradient.  "alias": as "scale",
    by another name.  "attribute": by what a tensor says."""

    def __init__(self, network, way):
        super().__init__()
        self.network, self.way = network, way

    def asked(self, values):
        if self.way == "alias":
            return recorded()
        if self.way == "attribute":
            return (values * torch.ones(4, device=values.device, requires_grad=True)).requires_grad
        return torch.is_grad_enabled()

    def forward(self, x):
        found = self.network(x)
        out = protocol.features_of(found["out"])
        if self.asked(out):
            factor = 3.0 if self.way != "leaf" else torch.ones(4, device=out.device, requires_grad=True)
            found["out"] = protocol.of(found["out"]).with_features(found["out"], out * factor)
        return found


@pytest.mark.parametrize("way", ["scale", "leaf", "alias", "attribute"])
def test_a_model_that_asks_whether_gradients_are_recorded(device, rules, way):
    rules.hold(graphs_of(64, watched=True))
    with apis.standin("spconv") as module:
        model, plain = frozen_pair(module, "spconv", device, lambda network: Asks(network, way))
        for seed in range(30):
            given = functools.partial(apis.scene, module, "spconv", seed, device)
            with torch.set_grad_enabled(seed % 3 > 0):
                (mine, wants), (theirs, expected) = values_of(model, given()), values_of(plain, given())
            assert wants == expected
            assert all(map(torch.equal, mine, theirs))
        part = graph_regions.summary()[0]
        if way != "leaf":
            assert part.hits >= 12 and part.graphs == 2
            assert not graph_regions.region_of(model).replayer.attempts.failures
        else:
            assert part.hits == 0 and Why.GRAPH_OTHER_MODE.name in part.reason


class Around(nn.Module):
    """A network, and what programs do with its input and output."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.register_buffer("gain", torch.full((4,), 2.0))

    def scaled(self, found, factor):
        out = protocol.features_of(found["out"]) * factor
        return {**found, "out": protocol.of(found["out"]).with_features(found["out"], out)}

    def forward(self, x):
        return self.scaled(self.network(x), self.gain)


class Records(Around):
    def forward(self, x):
        with torch.enable_grad():
            return super().forward(x)


class Marks(Around):
    """A map of what counts in the input."""

    def forward(self, x):
        with torch.enable_grad():
            values = x.features.requires_grad_()
            found = self.network(x)
            (counts,) = torch.autograd.grad(protocol.features_of(found["out"]).square().sum(), values)
        return {"out": x.replace_feature(counts), "deep": x.replace_feature(counts + 1)}


class IsInference(Around):
    def forward(self, x):
        return self.scaled(self.network(x), 3.0 if x.features.is_inference() else 1.0)


class ModeOfInference(Around):
    def forward(self, x):
        return self.scaled(self.network(x), 3.0 if torch.is_inference_mode_enabled() else 1.0)


class ReturnsParameter(Around):
    def forward(self, x):
        found = self.network(x)
        return {**found, "own": nn.Parameter(protocol.features_of(found["out"]).detach() * 2, requires_grad=False)}


def observed(model, x):
    """What a program sees of a call."""
    found = model(x)
    values = [*apis.values_of(found), *([found["own"]] if "own" in found else [])]
    kinds = [(type(one), one.requires_grad, one.is_leaf) for one in values]
    return [one.detach() for one in values], kinds, x.features.requires_grad


GRADIENTS = torch.enable_grad, torch.no_grad, torch.inference_mode


@pytest.mark.parametrize("kind", [Around, Records, Marks, IsInference, ModeOfInference, ReturnsParameter])
def test_what_a_program_sees(device, rules, kind):
    """In all modes of autograd, with parameters and buffers that require a gradient later, and inference tensors."""
    if device == "cpu" and kind is ModeOfInference:
        pytest.skip("pretended replays ask anew")
    rules.hold(graphs_of(64, watched=True))
    with apis.standin("spconv") as module:
        pair = frozen_pair(module, "spconv", device, lambda network: kind(network).to(device))
        for seed in range(45):
            seen = []
            for one in pair:
                with torch.inference_mode(kind is not Marks and seed % 3 == 2 and seed < 15):
                    x = apis.scene(module, "spconv", seed % 9, device)
                if seed == 20:
                    one.gain.requires_grad_(True)
                if seed == 28:
                    one.gain.requires_grad_(False)
                    one.requires_grad_(True)
                mode = GRADIENTS[seed % (3 if kind is not Marks and seed < 20 else 2)]
                with mode():
                    seen.append(observed(one, x))
            (mine, *rest), (theirs, *others) = seen
            assert rest == others, seed
            assert all(map(torch.equal, mine, theirs))


class Makes(nn.Module):
    """A program's own: it makes its sparse tensor itself."""

    def __init__(self, network, make):
        super().__init__()
        self.network, self.make = network, make

    def forward(self, values, coords):
        return self.network(self.make(values, coords, list(apis.SHAPE), 2))


def test_a_frozen_program_whose_features_require_a_gradient(device, rules):
    rules.hold(graphs_of(64, watched=True))
    with apis.standin("spconv") as module:
        model = Makes(apis.network(module, "spconv", device), module.SparseConvTensor).eval().requires_grad_(False)
        gradients = {}
        for mode in ("off", "graphs"):
            with settings.override(optimize=mode):
                for seed in range(16):
                    x = apis.scene(module, "spconv", seed, device)
                    values = x.features.clone().requires_grad_()
                    apis.loss_of(apis.values_of(model(values, x.indices))).backward()
                    gradients[mode, seed] = values.grad
        for seed in range(16):
            torch.testing.assert_close(gradients["graphs", seed], gradients["off", seed], rtol=1e-3, atol=1e-4)
        (part,) = graph_regions.summary()
        assert (part.name, part.reason) == ("Makes", None) and part.hits >= 5
