"""Norms and activations behind deferred layers: their short way is torch's for everybody else."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sparse_bridge import hooks
from sparse_bridge.core.conv import convolution, deferred, layers
from sparse_bridge.core.conv.deferred.features import DeferredFeatures, UnlaunchedFeatures
from sparse_bridge.core.conv.epilogue import Epilogue
from sparse_bridge.core.conv.plan import ConvForm
from tests.checks import assert_close
from tests.core.layers import layer, tensors


class Net(nn.Module):
    """The norm and the activation behind a convolution of 6 to 10 channels."""

    def __init__(self, inplace=False):
        super().__init__()
        self.norm, self.relu = nn.BatchNorm1d(10), nn.ReLU(inplace)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, features):
        return self.relu(self.norm(features))


class Unit:
    def __init__(self, inplace=False, sums=False):
        self.made = layer("submanifold", 2)
        self.x, self.weight, _, _ = tensors(self.made, 6, 10)
        self.net = Net(inplace).eval()
        n_out = self.made.truth(self.x, self.weight).shape
        self.other = torch.randn(n_out) if sums else None

    def features(self):
        y = layers.convolve_layer(self, self.x, self.weight, self.made.kmap, Epilogue(), ConvForm())
        return deferred.features_of(y)

    def __call__(self):
        with torch.no_grad():
            y = self.net.norm(self.features())
            return self.net.relu(y if self.other is None else y + self.other)

    def want(self):
        norm, y = self.net.norm, self.made.truth(self.x, self.weight)
        vectors = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        y = F.batch_norm(y, *(one.detach().double() for one in vectors))
        return F.relu(y if self.other is None else y + self.other)

    def known(self):
        for _ in range(5):
            self()
        assert with_fast_forward(self.net) == ["norm", "relu"]
        return self


def with_fast_forward(net):
    return [name for name, one in net.named_children() if "forward" in one.__dict__]


@pytest.fixture(autouse=True)
def everything_deferred(monkeypatch):
    monkeypatch.setattr(convolution, "MIN_DEFERRED_ELEMENTS", [0, 0])
    yield
    deferred.reset()


def detours(monkeypatch):
    """Functions of torch that come to deferred features from now on."""
    seen, original = [], DeferredFeatures.__torch_function__.__func__

    def told(cls, func, types, args=(), kwargs=None):
        seen.append(func)
        return original(cls, func, types, args, kwargs)

    monkeypatch.setattr(DeferredFeatures, "__torch_function__", classmethod(told))
    return seen


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_they_take_no_detour(monkeypatch, inplace, sums):
    unit = Unit(inplace, sums).known()
    seen = detours(monkeypatch)
    found = unit()
    assert not seen
    assert_close(found, unit.want())


def test_in_place_all_see_the_activation():
    unit = Unit(inplace=True).known()
    with torch.no_grad():
        y = unit.net.norm(unit.features())
        made = unit.net.relu(y)
    assert torch.equal(y + 0, made)
    assert_close(made, unit.want())


def test_whoever_reads_in_between():
    unit = Unit().known()
    with torch.no_grad():
        features = unit.features()
        normed = unit.net.norm(features)
        assert_close(features + 0, unit.made.truth(unit.x, unit.weight))
        assert_close(unit.net.relu(normed), unit.want())


def _changed(norm):
    norm.running_mean += 1


def _other_buffer(norm):
    norm.running_mean = norm.running_mean + 1


def _other_eps(norm):
    norm.eps = 0.3


def _trains(norm):
    norm.train()


def _hook(norm):
    norm.register_forward_hook(lambda module, args, out: out + 1)


def _subclass(norm):
    norm.__class__ = type("Shifted", (nn.BatchNorm1d,), {"forward": _shifted})
    del norm.__dict__["forward"]


def _shifted(self, x):
    return nn.BatchNorm1d.forward(self, x) + 1


@pytest.mark.parametrize("change", [_changed, _other_buffer, _other_eps, _trains, _hook, _subclass])
def test_another_norm_than_last_time(change):
    unit = Unit().known()
    alone = copy.deepcopy(unit.net)
    change(alone.norm)
    with torch.no_grad():
        want = alone(unit.made.truth(unit.x, unit.weight).float())
    change(unit.net.norm)
    for _ in range(3):
        if change is _trains:
            unit.net.norm.running_mean.copy_(alone.norm.running_mean)
        found = unit()
        assert_close(found, want.double())


@pytest.mark.parametrize("name", ["batch_norm", "relu"])
def test_functions_that_were_replaced(monkeypatch, name):
    unit, calls, original = Unit().known(), [], getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kw: calls.append(name) or original(*args, **kw) + 11)
    found = unit()
    assert set(calls) == {name}
    assert_close(found, unit.want())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.ReLU])
def test_classes_that_were_patched(monkeypatch, kind):
    unit, calls, original = Unit().known(), [], kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: calls.append(kind) or original(self, x))
    assert_close(unit(), unit.want())
    assert calls == [kind]


def _script(net, x):
    return torch.jit.script(net)


def _trace(net, x):
    return torch.jit.trace(net, x)


def _compile(net, x):
    return torch.compile(net, backend="eager", fullgraph=True)


def _fx(net, x):
    return torch.fx.symbolic_trace(net)


def _export(net, x):
    return torch.export.export(net, (x,)).module()


def _pickle(net, x):
    return pickle.loads(pickle.dumps(net))


def _deepcopy(net, x):
    return copy.deepcopy(net)


@pytest.mark.parametrize("made", [_script, _trace, _compile, _fx, _export, _pickle, _deepcopy])
def test_what_is_made_of_the_modules(made):
    net, x = Unit().known().net, torch.randn(7, 10)
    with torch.no_grad():
        want = Net.forward(copy.deepcopy(net), x)
        other = made(net, x)
        deferred.reset()
        assert torch.equal(net(x), want) and torch.equal(other(x), want)


def test_copies_are_themselves():
    net, x = Unit().known().net, torch.randn(7, 10)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.norm.forward.__self__ is twin.norm and not hooks.replaced(twin.norm)
        assert hooks.unseen(twin.relu) and twin.state_dict().keys() == net.state_dict().keys()
    shallow = copy.copy(net.norm)  # as torch's replicas are, whose buffers are others
    shallow._buffers = dict(net.norm._buffers, running_mean=torch.zeros(10))
    want = F.batch_norm(x, torch.zeros(10), net.norm.running_var, net.norm.weight, net.norm.bias)
    assert torch.equal(shallow(x), want) and not torch.equal(net.norm(x), want)
    shallow._forward_hooks = OrderedDict()
    shallow.register_forward_hook(lambda *call: None)
    assert torch.equal(shallow(x), want)


def test_what_is_loaded_gets_the_short_way_again():
    """And its shallow copies, such as replicas, are themselves; a pickle has but the method of the class."""
    unit = Unit().known()
    unit.net = pickle.loads(pickle.dumps(unit.net))
    unit.known()
    shallow, x = copy.copy(unit.net.norm), torch.randn(7, 10)
    shallow._buffers = dict(unit.net.norm._buffers, running_mean=torch.zeros(10))
    shallow._parameters = dict(unit.net.norm._parameters, bias=torch.nn.Parameter(torch.ones(10)))
    with torch.no_grad():
        want = F.batch_norm(x, torch.zeros(10), shallow.running_var, shallow.weight, torch.ones(10))
        assert torch.equal(shallow(x), want) and not torch.equal(unit.net.norm(x), want)


def test_they_are_given_back():
    net = Unit().known().net
    assert hooks.unseen(net.norm) and not hooks.replaced(net.relu)
    net.relu.forward = mine = lambda x: x
    assert hooks.replaced(net.relu)
    deferred.reset()
    assert with_fast_forward(net) == ["relu"] and net.relu.forward is mine


@pytest.mark.parametrize("left", [False, True])
def test_a_sum_on_either_side(left):
    unit = Unit(sums=True).known()
    with torch.no_grad():
        y = unit.net.norm(unit.features())
        y = unit.other + y if left else y + unit.other
        assert type(y) is UnlaunchedFeatures
        assert_close(unit.net.relu(y), unit.want())
        y = unit.net.norm(unit.features())
        want = unit.want()  # of numbers, and of others than tensors
        plain = y + 0
        assert torch.equal(y + 1, plain + 1) and torch.equal(2 + y, 2 + plain)
        with pytest.raises(TypeError):
            y + "one"
    assert want.shape == plain.shape


def test_modes_see_the_sum():
    unit, seen = Unit(sums=True).known(), []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        y = unit.net.norm(unit.features())
        with Mode():
            y = y + unit.other
        assert torch.Tensor.add in seen or torch.Tensor.__add__ in seen
        assert_close(unit.net.relu(y), unit.want())
