"""Models of all three frameworks, replayed from captured graphs."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch

import sparse_bridge
from sparse_bridge import hooks, settings
from sparse_bridge.adapters import protocol
from sparse_bridge.core.capture import graph_regions, replay
from sparse_bridge.core.capture.calls.call import constant
from sparse_bridge.core.conv.kernel_products import GatherProduct
from sparse_bridge.refusals import Refusal
from tests.core.capture.graph_sizes import graphs_of
from tests.rules import layers_deferred

from . import apis
from .pretended import replays_on_the_cpu

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("nothing_learnt")]


class Whole(torch.nn.Module):
    """A program's own: dense parts around sparse ones, which look at all rows."""

    def __init__(self, backbone, make):
        super().__init__()
        self.embed, self.backbone = torch.nn.Linear(4, 4), backbone
        self.head, self.make = torch.nn.Linear(4, 3), make

    def forward(self, values, coords):
        found = self.backbone(self.make(coords, self.embed(values)))
        rows = protocol.features_of(found["out"])
        return {**found, "scores": self.head(rows - rows.mean(0))}


class Made(torch.nn.Module):
    """A backbone that takes and returns a dictionary, and makes its sparse tensor itself."""

    def __init__(self, network, make):
        super().__init__()
        self.stem, self.body, self.make = network.stem, network, make

    def forward(self, batch):
        values, coords = batch["voxel_features"], batch["voxel_coords"]
        size = int(coords[:, 0].max()) + 1
        x = self.make(coords, values)
        x = self.stem(x)
        y = self.body.deep(self.body.down(x))
        out = self.body.head(self.body.cat(self.body.up(y), x))
        batch.update({"out": out, "deep": y, "size": size})
        batch["kind"] = batch["mode"] + "!"
        return batch


def maker(module, name):
    return lambda coords, values: apis.tensor(module, name, coords, values)


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", [Whole, Made])
def test_a_program_that_is_not_changed(kernel_lane, fake_gpu, rules, name, trains, kind):
    device = kernel_lane.device
    if device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))  # one class of rows, and whole tiles behind them
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        plain = kind(apis.network(module, name, device), maker(module, name))
        plain = plain.to(device).train(trains)
        model = copy.deepcopy(plain)
        for seed in range(11):
            found = []
            for one in (model, plain):
                one.zero_grad(set_to_none=True)
                x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed)
                framework = protocol.of(x)
                given = framework.features_of(x), framework.coordinates_of(x)
                if kind is Made:
                    batch = dict(zip(("voxel_features", "voxel_coords"), given, strict=True))
                    given = ({**batch, "names": [seed], "mode": "a" if seed < 10 else "b"},)
                mode = "graphs" if one is model else "off"
                with torch.set_grad_enabled(trains), settings.override(optimize=mode):
                    out = one(*given)
                if kind is Made:
                    assert out is given[0] and out["size"] == 2 and out["names"] == [seed]
                    assert out["kind"] == ("a!" if seed < 10 else "b!")
                values = [protocol.features_of(out[key]) for key in ("out", "deep")]
                if trains:
                    (values[0].square().sum() + values[1].sum()).backward()
                found.append((out, values))
            check(*found)
            if trains:
                same_gradients(model, plain)
        part = model.backbone if kind is Whole else model
        unit = part.__dict__["forward"]
        assert [one.name for one in graph_regions.summary() if one.hits] == [type(part).__name__]
        assert not any(map(hooks.replaced, copy.deepcopy(model).modules()))
        text = str(sparse_bridge.report())
        assert f"{type(part).__name__}: {unit.replayer.summary().hits} calls replayed from 1 graphs" in text
    assert not any(map(hooks.replaced, model.modules()))


class Told(torch.nn.Module):
    """A network that is told by which function of its framework it joins two tensors."""

    def __init__(self, network):
        super().__init__()
        self.body = network

    def forward(self, x, cat, act=torch.relu):
        x = self.body.stem(x)
        y = self.body.up(self.body.deep(self.body.down(x)))
        out = self.body.head(cat([y, x]) if type(x).__module__.startswith("torchs") else cat(y, x))
        return {"out": out, "deep": act(protocol.features_of(y))}


@pytest.mark.parametrize("name", ["torchsparse", "minkowski"])
def test_functions_among_the_arguments(kernel_lane, fake_gpu, rules, name):
    """They hold no state, and tell calls apart."""
    device = kernel_lane.device
    if device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))
    with apis.standin(name) as module, settings.override(optimize="graphs"), torch.no_grad():
        model = Told(apis.network(module, name, device)).to(device).eval()
        plain = copy.deepcopy(model)
        for seed in range(14):
            act, found = torch.sigmoid if seed > 9 else torch.relu, []
            for one in (model, plain):
                x = apis.scene(module, name, seed, device, 0.3 + 0.002 * seed)
                with settings.override(optimize="graphs" if one is model else "off"):
                    out = one(x, module.cat, act)
                found.append((out, [protocol.features_of(out["out"]), out["deep"]]))
            for mine, theirs in zip(found[0][1], found[1][1], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-3)
        (part,) = [one for one in graph_regions.summary() if one.hits]
        assert part.name == "Told" and part.graphs == 2 and part.hits >= 6


@pytest.mark.parametrize(
    ("value", "told"),
    [
        pytest.param(torch.relu, True, id="of torch"),
        pytest.param(torch.nn.ReLU, True, id="a class"),
        pytest.param(copy.copy, True, id="of Python"),
        pytest.param(math.sqrt, True, id="built in"),
        pytest.param(lambda x: x, True, id="without a name"),
        pytest.param([].append, False, id="a method"),
        pytest.param(torch.nn.ReLU(), False, id="a module"),
        pytest.param(functools.partial(torch.relu), False, id="partial"),
        pytest.param((lambda own: lambda: own)(1), False, id="a closure"),
    ],
)
def test_which_functions_tell_calls_apart(value, told):
    if told:
        assert constant(value) == constant(value) != constant(torch.tanh)
    else:
        with pytest.raises(Refusal, match="it is given a"):
            constant(value)


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("kind", ["inference", "fused", "training"])
def test_a_replayed_model(kernel_lane, fake_gpu, rules, name, kind):
    """Where kernels are emulated a replay runs what was captured once more.  fused: layers of this
    size wait for what follows them, too."""
    device, trains = kernel_lane.device, kind == "training"
    if kind == "fused":
        rules.hold(layers_deferred())
    if device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))  # one class of rows, and whole tiles behind them
    with apis.standin(name) as module:
        plain = apis.network(module, name, device).train(trains)
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(7):
            shape = apis.SHAPE if seed < 4 else (7, 5, 8 + seed)
            found = []
            for one in (model, plain):
                one.zero_grad(set_to_none=True)
                x = apis.scene(module, name, seed, device, 0.25 + 0.002 * seed, shape=shape)
                with torch.set_grad_enabled(trains):
                    out = one(x)
                values = [protocol.features_of(out[key]) for key in ("out", "deep")]
                if trains:
                    (values[0].square().sum() + values[1].sum()).backward()
                found.append((out, values))
            check(*found)
            if trains:
                same_gradients(model, plain)
        replayer = model.__dict__["forward"]
        replayer = replayer.training if trains else replayer
        # The fourth scene, and of those of other shapes all but the first, which proves it.
        assert replayer.reason is None and len(replayer.graphs) == 1
        # optimize() learns from the first in inference.
        assert replayer.hits == (3 if trains else 2)


@pytest.mark.parametrize("name", apis.NAMES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_are_launched_once_in_a_graph(kernel_lane, fake_gpu, rules, monkeypatch, name, mode):
    """Whatever was seen to follow them before, and in trials, where nothing is seen."""
    device, launches, captured = kernel_lane.device, [], []
    rules.hold(layers_deferred(), graphs_of(64))
    if device == "cpu":
        if mode is torch.inference_mode:
            pytest.skip("pretended replays compute with gradients")
        replays_on_the_cpu(fake_gpu)
    launch, capture = GatherProduct.over, replay.captured_from

    def counted(*given):
        launches.append(given)
        return launch(*given)

    def one_capture(*given):
        launches.clear()
        made = capture(*given)
        captured.append(len(launches))
        return made

    monkeypatch.setattr(GatherProduct, "over", counted)
    monkeypatch.setattr(replay, "captured_from", one_capture)
    with apis.standin(name) as module, settings.override(optimize="graphs"):
        model = apis.network(module, name, device).eval()
        last = []
        for seed in range(10):  # the larger ones make another graph
            x = apis.scene(module, name, seed, device, 0.3 if seed < 6 else 0.7)
            with mode():
                model(x)
            if captured:
                last.append(captured[-1])
                captured.clear()
        assert len(model.__dict__["forward"].replayer.graphs) == 1
    assert last == [5, 5]


def test_a_parameter_that_is_frozen_later(kernel_lane, fake_gpu, rules):
    """Its graph stands beside the first, and both leave gradients in the same places."""
    device = kernel_lane.device
    if device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))
    with apis.standin("spconv") as module:
        plain = apis.network(module, "spconv", device).train()
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(9):
            for one in (model, plain):
                next(one.parameters()).requires_grad_(seed not in (4, 5, 6, 7))
                one.zero_grad(set_to_none=True)
                out = one(apis.scene(module, "spconv", seed, device, 0.25 + 0.002 * seed))
                out["out"].features.square().sum().backward()
            assert (next(model.parameters()).grad is None) == (seed in (4, 5, 6, 7))
            same_gradients(model, plain)
        training = model.__dict__["forward"].training
        assert training.reason is None and len(training.graphs) == 2 and training.hits == 3


class Flat(torch.nn.Module):
    """A sparse network whose result becomes a grid for dense layers."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.head = torch.nn.Conv3d(4, 3, 1, bias=False)

    def forward(self, x):
        found = self.network(x)
        grid = self.head(found["out"].dense())
        return {**found, "grid": grid, "scores": grid.square().mean((2, 3, 4))}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_dense_grid_inside(kernel_lane, fake_gpu, rules, trains):
    """Its size follows from the input's, so that graphs are for one shape each."""
    device = kernel_lane.device
    if device == "cpu":
        replays_on_the_cpu(fake_gpu)
    rules.hold(graphs_of(512))
    with apis.standin("spconv") as module:
        plain = Flat(apis.network(module, "spconv", device)).to(device).train(trains)
        model = sparse_bridge.optimize(copy.deepcopy(plain), graphs=True)
        for seed in range(10):
            shape, found = apis.SHAPE if seed < 8 else (7, 5, 8), []
            for one in (model, plain):
                one.zero_grad(set_to_none=True)
                x = apis.scene(module, "spconv", seed, device, 0.25 + 0.002 * seed, shape=shape)
                with torch.set_grad_enabled(trains):
                    out = one(x)
                values = [protocol.features_of(out["out"]), out["grid"], out["scores"]]
                if trains:
                    (values[1].mean() + values[2].sum()).backward()
                found.append(values)
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
            if trains:
                same_gradients(model, plain)
        replayer = model.__dict__["forward"]
        replayer = replayer.training if trains else replayer
        assert replayer.reason is None and len(replayer.graphs) == 1 and replayer.by_box
        assert replayer.hits >= 1


def check(mine, theirs):
    framework = protocol.of(mine[0]["out"])
    for key in ("out", "deep"):
        one, other = (framework.coordinates_of(found[0][key]) for found in (mine, theirs))
        assert extent(mine[0][key]) == extent(theirs[0][key])
        assert torch.equal(one, other)
    for one, other in zip(mine[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def extent(x):
    return [getattr(x, name, None) for name in ("spatial_shape", "batch_size", "stride")]


def same_gradients(model, plain):
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is None:
            continue
        scale = float(q.grad.abs().max()) + 1
        assert float((p.grad - q.grad).abs().max()) <= 2e-3 * scale, name
