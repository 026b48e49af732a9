"""Random stacks of layers: the wheel alone, bridged, and through the stand-in."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import sparse_bridge

from . import apis, random_nets

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK, THOROUGH = range(60), range(60, 400)
# A norm over two channels: +1 and -1 whatever goes in, a gradient of cancelled digits.
ILL_CONDITIONED = 228


def compare(seed):
    wheel = apis.wheel()
    dtype = torch.float64 if seed % 5 == 0 else torch.float32
    net = random_nets.make(wheel, seed, dtype)
    want = random_nets.run(wheel, net)
    with sparse_bridge.enable("spconv", mode="patch"):
        got = random_nets.run(wheel, net)
    exact = functools.partial(random_nets.exact, wheel, net)
    differs = random_nets.difference(got, want, exact)
    assert differs is None, f"{net.text}\n{differs}"
    return net, want, exact


@pytest.mark.parametrize("seed", [*QUICK, ILL_CONDITIONED])
def test_bridged_equals_native(seed):
    compare(seed)


def test_what_an_ill_conditioned_net_may_differ_by():
    """As much as the wheel is off itself, in the gradients that are ill-conditioned alone."""
    _, want, exact = compare(ILL_CONDITIONED)
    gradient, true = want.gradients["input"], exact().gradients["input"]
    assert random_nets._error(gradient, true) > 1e-4
    for name, shift in (("input", 4 * (gradient - true).abs().max()), ("0.weight", 1e-4), ("2.bias", 1e-3)):
        got = dataclasses.replace(want, gradients=dict(want.gradients))
        got.gradients[name] = want.gradients[name] + shift
        assert f"gradient of {name} differs" in random_nets.difference(got, want, exact)


@pytest.mark.slow
def test_bridged_equals_native_thoroughly():
    answered = [compare(seed)[1].error is None for seed in THOROUGH]
    assert sum(answered) > len(answered) / 2


@pytest.mark.parametrize("seed", QUICK[::3])
def test_standin_equals_native(seed):
    net, want, exact = compare(seed)
    dtype = net.features.dtype
    with apis.standin() as standin:
        ours = random_nets.make(standin, seed, dtype)
        assert torch.equal(ours.features, net.features)
        ours.layers.load_state_dict(net.layers.state_dict())
        differs = random_nets.difference(random_nets.run(standin, ours), want, exact)
    assert differs is None, f"{net.text}\n{differs}"
