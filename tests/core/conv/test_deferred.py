"""Deferred convolutions: to what they are deferred, and who else may look."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge import settings
from sparse_bridge.core.conv import convolution, deferred, history, layers, plan
from sparse_bridge.core.conv.deferred import conv as deferred_conv
from sparse_bridge.core.conv.deferred.conv import DeferredConv
from sparse_bridge.core.conv.deferred.features import ObservedFeatures, UnlaunchedFeatures
from sparse_bridge.core.conv.epilogue import ACTIVATIONS, Epilogue
from sparse_bridge.core.conv.plan import ConvForm
from sparse_bridge.core.device import trace
from tests.checks import assert_close
from tests.core.layers import layer, tensors


class Layer:
    """A convolution of 6 to 10 channels, and the norm behind it."""

    def __init__(self):
        self.made = layer("submanifold", 2)
        self.x, self.weight, _, _ = tensors(self.made, 6, 10)
        self.norm = [torch.rand(10), torch.rand(10) + 0.5, torch.rand(10), torch.rand(10)]

    def __call__(self):
        """Features as whoever takes them out of a sparse tensor has them."""
        with torch.no_grad():
            y = layers.convolve_layer(self.weight, self.x, self.weight, self.made.kmap, Epilogue(), ConvForm())
        return deferred.features_of(y)

    def normed(self, y):
        with torch.no_grad():
            return F.batch_norm(y, *self.norm)

    def unit(self):
        with torch.no_grad():
            return F.relu(self.normed(self()))

    def want(self):
        return self.made.truth(self.x, self.weight)


@pytest.fixture
def conv(monkeypatch):
    monkeypatch.setattr(convolution, "MIN_DEFERRED_ELEMENTS", [0, 0])
    return Layer()


def launches(run):
    """The launches of a call, by the steps that their epilogues have."""
    seen, original = [], plan.run

    def spy(x, weight, kmap, epilogue, form):
        parts = epilogue.norm, epilogue.residual, epilogue.activation
        seen.append("".join(n for n, part in zip("nsa", parts, strict=True) if part is not None))
        return original(x, weight, kmap, epilogue, form)

    deferred_conv.run = history.run = spy
    try:
        run()
    finally:
        deferred_conv.run = history.run = original
    return seen


def test_a_layer_is_deferred_once_it_is_known_what_follows(conv):
    first = conv.unit()
    assert type(first) is torch.Tensor
    assert launches(conv.unit) == ["na"]
    assert torch.equal(conv.unit(), first), "the first call computes what later ones do"
    with settings.override(optimize="off"):
        assert launches(conv.unit) == []
        assert_close(conv.unit(), first.double())


def test_layers_that_nothing_follows_are_left_alone(conv):
    kinds = [type(conv()) for _ in range(6)]
    assert kinds == [ObservedFeatures] * 4 + [torch.Tensor] * 2


def test_small_layers_are_not_deferred(conv, monkeypatch):
    monkeypatch.setattr(convolution, "MIN_DEFERRED_ELEMENTS", [conv.want().numel() + 1, 0])
    assert type(conv()) is torch.Tensor


class Two(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


READS = {
    "numpy": lambda y: torch.from_numpy(y.numpy()),
    "asarray": lambda y: torch.from_numpy(np.asarray(y)),
    "list": lambda y: torch.tensor(y.tolist()),
    "copy": copy.deepcopy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "dlpack": torch.from_dlpack,
    "rows": lambda y: torch.cat([y[:5], y[5:]]),
    "named": lambda y: torch.stack(Two(y, y))[1],
    "linear": lambda y: F.linear(y, torch.eye(10)),
    "detach": lambda y: y.detach(),
    "contiguous": lambda y: y.contiguous().to(y.dtype),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", READS)
def test_whoever_reads_sees_the_convolution(conv, name, known):
    for _ in range(2 * known):
        conv.unit()
    y = conv()
    assert type(y) is (UnlaunchedFeatures if known else ObservedFeatures)
    assert tuple(y.shape) == tuple(conv.want().shape) and y.dtype == conv.x.dtype
    found = READS[name](y)
    assert type(found) is torch.Tensor
    assert_close(found, conv.want())
    assert y.data_ptr() != 0 and isinstance(y, torch.Tensor)
    assert_close(conv.normed(y), F.batch_norm(conv.want(), *(v.double() for v in conv.norm)))


def test_what_is_read_in_between_is_not_computed_twice(conv):
    def both():
        y = conv()
        z = conv.normed(y)
        return y + 0, z

    for _ in range(4):
        y, z = both()
        assert_close(y, conv.want())
        assert_close(z, F.batch_norm(conv.want(), *(v.double() for v in conv.norm)))
    assert launches(both) == []


def test_changes_in_place_between_a_layer_and_its_norm(conv):
    def changed():
        y, before = conv(), conv.want()
        with torch.no_grad():
            conv.weight.mul_(1.5)
        want = F.batch_norm(before, *(v.double() for v in conv.norm))
        assert_close(conv.normed(y), want)

    for _ in range(4):
        changed()


def test_a_norm_in_training_between_the_norm_and_who_reads_it(conv):
    """Torch moves statistics in training without counting that."""
    want = F.batch_norm(conv.want(), *(v.double() for v in conv.norm))
    y = conv.normed(conv())
    F.batch_norm(torch.randn(20, 10), *conv.norm, training=True)
    assert type(y) is ObservedFeatures
    assert_close(y.clone(), want)


def activations():
    """(a row, a call for it, whether it writes into its input)"""
    for row in ACTIVATIONS.values():
        for call in row.calls + row.calls_:
            yield row, call, call in row.calls_
        if row.calls[0] in (F.relu, F.leaky_relu):
            yield row, functools.partial(row.calls[0], inplace=True), True


@pytest.mark.parametrize("row, call, overwrites", list(activations()))
def test_every_function_of_an_activation_joins_the_layer(conv, row, call, overwrites):
    """In place, whoever holds the features sees it."""
    want = row.apply(F.batch_norm(conv.want(), *(v.double() for v in conv.norm)), row.arguments()[0])

    def run():
        with torch.no_grad():
            y = conv.normed(conv())
            found = call(y)
        assert_close(found + 0, want)
        if overwrites:
            assert_close(y + 0, want)

    run()
    assert launches(run) == ["na"]
    run()


def test_a_change_that_never_was_is_named(conv):
    for _ in range(2):
        conv.unit()
    y = conv()
    conv.x.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place between.*OPTIMIZE=off"):
        y.clone()
    assert_close(conv.unit(), F.relu(F.batch_norm(conv.want(), *(v.double() for v in conv.norm))))


def test_changes_of_the_result_count(conv):
    for known in range(3):
        y = conv()
        if known == 2:
            assert type(y) is torch.Tensor, "somebody else writes into it"
        y.add_(1)
        assert_close(conv.normed(y), F.batch_norm(conv.want() + 1, *(v.double() for v in conv.norm)))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_other_modes(conv, mode):
    for _ in range(2):
        conv.unit()
    y = conv()
    with mode():
        found = F.batch_norm(y, *conv.norm)
    assert found.is_inference() == (mode is torch.inference_mode) and not y.is_inference()
    with mode():
        y = layers.convolve_layer(conv.weight, conv.x, conv.weight, conv.made.kmap, Epilogue(), ConvForm())
    assert type(y) is torch.Tensor


class Unseen(TorchDispatchMode):
    """Sees every operation, and changes none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_compiled_layers_take_them(conv):
    norm = torch.nn.BatchNorm1d(10).eval()
    tail = torch.compile(torch.nn.Sequential(norm, torch.nn.ReLU()), backend="eager", fullgraph=True)
    want = F.relu(F.batch_norm(conv.want(), *(v.double() for v in norm.buffers() if v.ndim)))
    with torch.no_grad():
        for _ in range(3):
            assert_close(tail(conv()), want)


@pytest.mark.parametrize("mode", [Unseen, torch.inference_mode])
def test_calls_of_which_nothing_is_learnt(conv, mode):
    """What is known stays known, however many they are, and what is not can be found out later."""
    for known in range(3):
        for _ in range(6):
            with mode():
                y = layers.convolve_layer(conv.weight, conv.x, conv.weight, conv.made.kmap, Epilogue(), ConvForm())
            assert type(y) is torch.Tensor
        kind = type(conv())
        assert kind is (UnlaunchedFeatures if known else ObservedFeatures)
        conv.unit()
        conv.unit()


def test_recorded_operations_are_counted_once(conv):
    for _ in range(2):
        conv.unit()
    with trace.record() as events:
        conv.unit()
    assert [event.kind for event in events] == ["conv"]


def test_copies_of_deferred_features_know_nothing(conv):
    y = conv()
    assert type(y.conv) is DeferredConv
    assert copy.copy(y.conv) is None and pickle.loads(pickle.dumps(y.conv)) is None
