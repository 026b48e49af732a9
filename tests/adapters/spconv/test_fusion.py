"""Fused inference: containers give what their children give one by one, whenever that could be
noticed and when not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse_bridge.core.conv import convolution as core_conv
from sparse_bridge.core.conv import layers
from sparse_bridge.core.conv.fused_plan import FusedPlan
from tests.checks import assert_close

from . import apis


def scene(sp, device="cpu"):
    x = apis.tensor(sp, channels=5)
    x.indices = x.indices.to(device)
    return x.replace_feature(x.features.to(device))


def network(sp, activation=nn.ReLU, bias=True, **norm):
    torch.manual_seed(0)
    net = sp.SparseSequential(
        sp.SubMConv3d(5, 16, 3, bias=bias, indice_key="a"),
        nn.BatchNorm1d(16, **norm),
        activation(),
        sp.SparseConv3d(16, 24, 3, stride=2, bias=False),
        nn.BatchNorm1d(24),
        nn.Dropout(0.5),
        sp.SubMConv3d(24, 7, 1),
        nn.BatchNorm1d(7),
        nn.ReLU(),
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_() if module.running_mean is not None else None
            module.running_var.uniform_(0.5, 2) if module.running_var is not None else None
            if module.affine:
                nn.init.uniform_(module.weight, -1, 1)
                nn.init.normal_(module.bias)
    return net.eval()


def one_by_one(net, x):
    """The children with gradients on: never fused."""
    with torch.enable_grad():
        return net(x)


@pytest.fixture
def fused(monkeypatch):
    """How many convolutions were given a norm."""
    calls = []

    def spy(owner, original):
        def told(x, weight, kmap, epilogue, form):
            if epilogue.norm is not None:
                calls.append(epilogue.activation)
            return original(x, weight, kmap, epilogue, form)

        monkeypatch.setattr(owner, original.__name__, told)

    def launch(self, given, bias, residual):
        if self.between.norm is not None:
            calls.append(self.activation[0])
        return launched(self, given, bias, residual)

    spy(core_conv, core_conv.convolve)
    spy(layers, layers.run)  # the first call of a layer whose epilogue is known
    launched = FusedPlan.launch
    monkeypatch.setattr(FusedPlan, "launch", launch)
    return calls


@pytest.mark.parametrize(
    "activation, name",
    [(nn.ReLU, "relu"), (lambda: nn.LeakyReLU(0.2), "leaky_relu"), (nn.Sigmoid, "sigmoid"), (nn.GELU, None)],
)
@pytest.mark.parametrize("norm", [{}, {"affine": False}, {"eps": 0.5}])
def test_fused_equals_one_by_one(sp, lane, fused, activation, name, norm):
    net = network(sp, activation, **norm).to(lane.device)
    x = scene(sp, lane.device)
    want = one_by_one(net, x)
    assert fused == []
    with torch.no_grad():
        found = net(x)
    assert fused == [name, None]
    assert_close(found.features, want.features.detach().double())
    assert torch.equal(found.indices, want.indices)


def test_changes_of_the_norm_are_seen(sp, fused):
    """Even those that torch's version counters do not tell."""
    net, x = network(sp), scene(sp)
    with torch.no_grad():
        net(x)
        net[1].weight.data.mul_(3)
        net[1].running_mean.data.add_(1)
        found = net(x)
    assert len(fused) == 4
    assert_close(found.features, one_by_one(net, x).features.detach().double())


@pytest.mark.parametrize(
    "how", ["hook", "pre-hook", "conv hook", "train", "statistics", "forward", "subclass", "global"]
)
def test_whoever_looks_sees_every_layer(sp, fused, how):
    net, x = network(sp, track_running_stats=how != "statistics"), scene(sp)
    seen = []
    handles = []
    if how == "hook":
        handles += [net[1].register_forward_hook(lambda m, i, o: seen.append(o))]
    elif how == "pre-hook":
        handles += [net[1].register_forward_pre_hook(lambda m, i: seen.append(i))]
    elif how == "conv hook":
        handles += [net[0].register_forward_hook(lambda m, i, o: seen.append(o))]
    elif how == "train":
        net[1].train()
    elif how == "forward":
        net[1].forward = lambda value: seen.append(value) or value
    elif how == "subclass":
        net[1].__class__ = type("Norm", (nn.BatchNorm1d,), {})
    elif how == "global":
        register = torch.nn.modules.module.register_module_forward_hook
        handles += [register(lambda m, i, o: seen.append(o))]
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    assert "relu" not in fused
    assert len(fused) == (0 if how == "global" else 1)
    assert bool(seen) == (how not in ("train", "statistics", "subclass"))


def test_activations_with_hooks_stay_apart(sp, fused):
    net, x = network(sp), scene(sp)
    net[2].register_forward_hook(lambda m, i, o: o + 1)
    with torch.no_grad():
        found = net(x)
    assert fused == [None, None]
    assert_close(found.features, one_by_one(net, x).features.detach().double())


def test_half_models_and_autocast(sp, lane, fused):
    if lane.device == "cpu":
        pytest.skip("half precision of the norm differs on the CPU")
    net, x = network(sp).to(lane.device), scene(sp, lane.device)
    want = one_by_one(net, x).features.detach().double()
    with torch.no_grad(), torch.autocast(lane.device, torch.float16):
        found = net(x)
    assert found.features.dtype == torch.float16
    assert_close(found.features, want, torch.float16)
    half = copy.deepcopy(net).half()
    with torch.no_grad():
        found = half(x.replace_feature(x.features.half()))
    assert_close(found.features, want, torch.float16)


def test_fp64_stays_exact(sp):
    net, x = network(sp).double(), scene(sp)
    x = x.replace_feature(x.features.double())
    with torch.no_grad():
        found = net(x)
    torch.testing.assert_close(found.features, one_by_one(net, x).features.detach())
