"""Random stacks of layers: the wheel alone, bridged, and through the stand-in."""

from __future__ import annotations

import pytest
import torch

import sparse_bridge

from . import doors, random_nets

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK, THOROUGH = range(60), range(60, 400)


def compare(seed):
    wheel = doors.wheel()
    dtype = torch.float64 if seed % 5 == 0 else torch.float32
    net = random_nets.make(wheel, seed, dtype)
    want = random_nets.run(wheel, net)
    with sparse_bridge.enable("spconv", mode="patch"):
        got = random_nets.run(wheel, net)
    differs = random_nets.difference(got, want)
    assert differs is None, f"{net.text}\n{differs}"
    return net, want


@pytest.mark.parametrize("seed", QUICK)
def test_bridged_equals_native(seed):
    compare(seed)


@pytest.mark.slow
def test_bridged_equals_native_thoroughly():
    answered = [compare(seed)[1].error is None for seed in THOROUGH]
    assert sum(answered) > len(answered) / 2


@pytest.mark.parametrize("seed", QUICK[::3])
def test_standin_equals_native(seed):
    net, want = compare(seed)
    dtype = net.features.dtype
    with doors.standin() as standin:
        ours = random_nets.make(standin, seed, dtype)
        assert torch.equal(ours.features, net.features)
        ours.layers.load_state_dict(net.layers.state_dict())
        differs = random_nets.difference(random_nets.run(standin, ours), want)
    assert differs is None, f"{net.text}\n{differs}"
