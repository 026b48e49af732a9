"""Timing layers that share a map, on real kernels of an emulated GPU with pretended times, and on a
GPU with its own."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core import functional
from sparse_bridge.core.conv import plan as plans
from sparse_bridge.core.conv import registry
from sparse_bridge.core.conv.choice import serving_flow
from sparse_bridge.core.device import trace
from sparse_bridge.core.tuning import tuner
from sparse_bridge.core.tuning.tuner import Tuner
from sparse_bridge.tools import group_race
from tests.checks import assert_close
from tests.core.conv.test_override import Conv
from tests.core.layers import layer, tensors
from tests.core.tuning import here, never, problem, tuning

pytest.importorskip("triton")
KINDS = ("submanifold", "inverse")


class Clock:
    """Seconds by what runs: a product of a dataflow, or the building of a view."""

    def __init__(self, flows, build=1e-3):
        self.flows, self.build, self.runs = flows, build, []

    def __call__(self, run, limit):
        product = getattr(run, "func", None)
        name = "build" if product is None else product.flow.name
        self.runs.append(name)
        return self.build if product is None else self.flows.get(name, 1e-3)

    def tuner(self, **options):
        return Tuner(self, how="compile", budget=600.0, count=1, **options)


@pytest.fixture
def by_rule(kernel_lane, monkeypatch):
    """Kernels on a device of the lane, chosen as nobody forces them."""
    chosen = registry.choose
    ruled = registry.entry("masked").by_rule()

    def choose(case, wanted=""):
        return chosen(case, wanted) if wanted or not case.regular else ruled

    monkeypatch.setattr(plans, "registry", types.SimpleNamespace(**vars(registry)))
    monkeypatch.setattr(plans.registry, "choose", choose)
    plans.reset()
    yield kernel_lane
    plans.reset()


def flows(work):
    with trace.record() as events:
        out = work()
    return out, [event.dataflow for event in events]


def setup(lane, kind="submanifold", channels=16):
    made = layer(kind, 1, device=lane.device)
    x, weight, _, dy = tensors(made, channels, channels)
    return made, x, weight, dy, lane.device


@pytest.mark.emulated
@pytest.mark.parametrize("kind, fast", [("submanifold", "unmasked"), ("strided", "masked"), ("inverse", "masked")])
def test_inference_takes_what_is_fastest(by_rule, tmp_path, kind, fast):
    made, x, weight, _, device = setup(by_rule, kind)
    clock = Clock({fast: 1e-4}, build=1e-6)

    def work(one=made):
        for w in (2 * weight, weight):
            y = functional.conv(x.to(device), w.to(device), None, one.kmap)
        return y

    with tuning("full", tmp_path), tuner.use(clock.tuner()) as found:
        with group_race.tuned():
            work()
        (winner,) = found.groups
        assert set(winner.flows.values()) == {fast} and set(winner.layers.values()) == {2}
        assert {"build", "masked", "unmasked"} == set(clock.runs), "others have other bits"
        assert 200.0 <= winner.microseconds <= 203.0 and winner.rule_microseconds >= 2000.0
        count = len(clock.runs)
        with group_race.tuned():
            work()
        assert len(clock.runs) == count, "it is known"
    again = layer(kind, 1, device=device)
    with tuning("cached", tmp_path), tuner.use(Tuner(never)):
        got, names = flows(lambda: work(again))
        assert names == [fast] * 2
        assert_close(got, made.truth(x, weight))
        assert f"{fast} for fwd" in sparse_bridge.report().groups[0]


@pytest.mark.emulated
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_decided_apart_with_its_gradients(by_rule, tmp_path, kind):
    made, x, weight, dy, device = setup(by_rule, kind)
    clock = Clock({"unmasked": 1e-5, "masked": 1e-3}, build=1e-6)

    def step(one=made):
        a, b = (t.to(device).requires_grad_() for t in (x, weight))
        y = functional.conv(a, b, None, one.kmap)
        return [y.detach(), *torch.autograd.grad(y, (a, b), dy.to(device))]

    with tuning("off", tmp_path):
        want = step(layer(kind, 1, device=device))
    with tuning("full", tmp_path), tuner.use(clock.tuner()) as found, group_race.tuned():
        step()
    (winner,) = found.groups
    assert {name[:3] for name in winner.layers} == {"fwd", "dgr"}
    assert set(winner.flows.values()) == {"unmasked"} and "/training/" in winner.map_class
    again = layer(kind, 1, device=device)
    with tuning("cached", tmp_path), tuner.use(Tuner(never)):
        got, names = flows(lambda: step(again))
        assert names == ["unmasked"]
        for one, other in zip(got, want, strict=True):
            assert_close(one, other.double())
    other = winner.map_class.replace("/training/", "/inference/")
    assert all(one.map_class != other for one in found.groups), "nobody has tuned inference"


@pytest.mark.emulated
def test_a_gain_within_the_noise_keeps_the_rules(by_rule, tmp_path):
    made, x, weight, _, device = setup(by_rule)
    clock = Clock({"unmasked": 0.98e-3, "masked": 1e-3}, build=0.0)
    with tuning("full", tmp_path), tuner.use(clock.tuner()) as found, group_race.tuned():
        functional.conv(x.to(device), weight.to(device), None, made.kmap)
    (winner,) = found.groups
    assert not winner.flows and winner.microseconds == winner.rule_microseconds


@pytest.mark.emulated
def test_layers_with_a_dataflow_of_their_own_are_left_out(by_rule, tmp_path):
    made, x, weight, _, device = setup(by_rule)
    module = Conv(weight).to(device)
    sparse_bridge.dataflow(module, "masked")
    clock = Clock({"unmasked": 1e-6})
    with tuning("full", tmp_path), tuner.use(clock.tuner()) as found, torch.no_grad():
        with group_race.tuned():
            module(x.to(device), made.kmap)
        assert not found.groups and not clock.runs
        sparse_bridge.dataflow(module, None)
        with group_race.tuned():
            module(x.to(device), made.kmap)
        assert len(found.groups) == 1
        sparse_bridge.dataflow(module, "masked")
        again = layer("submanifold", 1, device=device)
        assert flows(lambda: module(x.to(device), again.kmap))[1] == ["masked"]
        assert "masked dataflow given to 1 Conv" in str(sparse_bridge.report())


@pytest.mark.emulated
def test_a_wrong_dataflow_never_wins(by_rule, tmp_path, monkeypatch):
    made, x, weight, _, device = setup(by_rule)
    flow = registry.entry("unmasked")
    view = type(flow).view

    def broken(self, rulebook, side, target):
        table, reverse = view(self, rulebook, side, target)
        return table.roll(1, 1), reverse

    monkeypatch.setattr(type(flow), "view", broken)
    clock = Clock({"unmasked": 1e-6})
    with tuning("full", tmp_path), tuner.use(clock.tuner()) as found, group_race.tuned():
        functional.conv(x.to(device), weight.to(device), None, made.kmap)
    assert "unmasked" not in clock.runs and not found.groups[0].flows


@pytest.mark.emulated
def test_the_budget_bounds_what_is_timed(by_rule, tmp_path):
    made, x, weight, _, device = setup(by_rule)
    ticks = itertools.count()
    clock = Clock({"unmasked": 1e-6})
    slow = Tuner(clock, how="compile", budget=1.5, count=1, clock=lambda: next(ticks))
    with tuning("full", tmp_path), tuner.use(slow) as found, group_race.tuned():
        functional.conv(x.to(device), weight.to(device), None, made.kmap)
    assert clock.runs == ["build", "masked"]
    (winner,) = found.groups
    assert not winner.flows and winner.tested == 2


def test_a_device_without_a_clock_is_left_alone(tmp_path):
    """On the CPU plain torch computes, and nothing is timed."""
    made = layer("submanifold", 2)
    x, weight, _, _ = tensors(made, 4, 4)
    with tuning("full", tmp_path), tuner.use(Tuner()) as found, group_race.tuned():
        functional.conv(x, weight, None, made.kmap)
    assert not found.groups and not here(tmp_path, problem()).contents().groups


class Three(torch.nn.Module):
    """Layers that share a map."""

    def __init__(self, device, dtype):
        super().__init__()
        make = torch.randn(3, 27, 64, 64, device=device) * (27 * 64) ** -0.5
        self.weights = torch.nn.ParameterList([one.to(dtype) for one in make])

    def forward(self, x, kmap):
        for weight in self.weights:
            x = functional.conv(x, weight, None, kmap)
        return x


@pytest.mark.emulated
def test_optimize_tunes_where_it_is_told_to(by_rule, tmp_path, monkeypatch):
    made, x, weight, _, device = setup(by_rule)
    model = Conv(weight).to(device).eval()
    clock = Clock({"unmasked": 1e-6})
    with tuner.use(clock.tuner()) as found, torch.no_grad():
        with tuning("cached", tmp_path):
            sparse_bridge.optimize(model, x.to(device), made.kmap)
        assert not clock.runs and not found.groups
        sparse_bridge.restore(model)
        with tuning("full", tmp_path):
            sparse_bridge.optimize(model, x.to(device), made.kmap)
        assert len(found.groups) == 1 and found.groups[0].flows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_gpu_tunes_a_network_of_three_layers(tmp_path, dtype):
    """By its own times, inference and training; results stay within the tolerance."""
    coords = torch.stack(torch.meshgrid(*map(torch.arange, (1, 40, 40, 40)), indexing="ij"), -1)
    coords = coords.reshape(-1, 4)[::3].int().cuda()
    cmap = functional.coordinate_map(coords, (40, 40, 40), 1)
    model = Three("cuda", dtype)
    x = torch.randn(len(coords), 64, device="cuda", dtype=dtype, requires_grad=True)

    def work(train):
        kmap = functional.submanifold(cmap, functional.kernel_offsets((3, 3, 3)))
        with torch.set_grad_enabled(train):
            y = model(x, kmap)
        leaves = (x, *model.parameters())
        return [y.detach(), *(torch.autograd.grad(y.float().mean(), leaves) if train else ())]

    with tuning("off", tmp_path):
        want = [work(train) for train in (False, True)]
    for train in (False, True):
        with tuning("full", tmp_path), tuner.use(Tuner(how="blocking", budget=2.0)) as found:
            with group_race.tuned():
                work(train)
            (winner,) = found.groups
            assert winner.tested > 2 and winner.microseconds <= winner.rule_microseconds
            assert set(winner.layers.values()) == {3}
    with tuning("cached", tmp_path), tuner.use(Tuner(never)):
        for train in (False, True):
            for got, expected in zip(work(train), want[train], strict=True):
                assert_close(got, expected.double(), dtype)


def test_the_rule_and_the_tuner_are_asked_in_one_place():
    """Warm-up compiles what layers will take."""
    from sparse_bridge.core.conv.dataflows import masked
    from sparse_bridge.core.warmup import product_kernels

    assert masked.serving_flow is serving_flow
    assert product_kernels.masked is masked
    assert settings.get().tune in settings.CHOICES["tune"]
