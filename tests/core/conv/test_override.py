"""The dataflow of single modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core import functional
from sparse_bridge.core.conv import override
from sparse_bridge.core.device import trace
from sparse_bridge.errors import DeviceError, SettingError
from tests.checks import assert_close, assert_error
from tests.core.layers import layer, tensors


class Conv(nn.Module):
    """A layer over the map of its input, (x, kmap)."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x, kmap):
        return functional.conv(x, self.weight, None, kmap)


class Two(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.one, self.two = Conv(weight), Conv(weight)

    def forward(self, x, kmap):
        return self.two(self.one(x, kmap), kmap)


@pytest.fixture
def made():
    found = layer("submanifold", 2)
    x, weight, _, _ = tensors(found, 8, 8)
    return found.kmap, x, weight


def flows(module, *inputs):
    with trace.record() as events:
        module(*inputs)
    return [event.dataflow for event in events]


def test_a_layer_and_a_container(made):
    kmap, x, weight = made
    net = Two(weight)
    want = net(x, kmap)
    sparse_bridge.dataflow(net.one, "explicit")
    assert flows(net, x, kmap) == ["explicit", "per_offset"]
    assert_close(net(x, kmap), want.double())
    sparse_bridge.dataflow(net, "explicit")
    sparse_bridge.dataflow(net.one, "per_offset")  # the inner choice counts
    assert flows(net, x, kmap) == ["per_offset", "explicit"]
    for module in (net, net.one):
        sparse_bridge.dataflow(module, None)
    assert flows(net, x, kmap) == ["per_offset"] * 2
    assert not net._forward_hooks and not net.one._forward_pre_hooks


def test_the_backward_pass_takes_it_too(made):
    kmap, x, weight = made
    one, two = Conv(weight), Conv(weight)
    sparse_bridge.dataflow(two, "explicit")
    grads = []
    for module in (one, two):
        leaf = x.clone().requires_grad_()
        module(leaf, kmap).square().sum().backward()
        grads.append((leaf.grad, module.weight.grad))
    for a, b in zip(*grads, strict=True):
        assert_close(a, b.double())


def test_copies_and_pickles_keep_it(made):
    kmap, x, weight = made
    module = Conv(weight)
    sparse_bridge.dataflow(module, "explicit")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert flows(other, x, kmap) == ["explicit"] and override.of(other) == "explicit"
        sparse_bridge.dataflow(other, "auto")
        assert flows(other, x, kmap) == ["per_offset"]


def test_a_call_that_fails_leaves_nothing_behind(made):
    kmap, x, weight = made
    module = Conv(weight)
    sparse_bridge.dataflow(module, "explicit")
    with pytest.raises(sparse_bridge.errors.ShapeError):
        module(x[:-1], kmap)
    assert override.current() == "" and override.inside == 0
    assert flows(Conv(weight), x, kmap) == ["per_offset"]


def test_what_cannot_serve_says_who_asked(made):
    kmap, x, weight = made
    module = Conv(weight)
    sparse_bridge.dataflow(module, "grouped")
    words = ["sparse_bridge.dataflow(module, 'grouped')", "layers on a CPU are computed in torch", "auto or per_offset"]
    assert_error(lambda: module(x, kmap), DeviceError, words)
    assert_error(lambda: sparse_bridge.dataflow(module, "best"), SettingError, ["'best'", "masked"])


def test_the_report_lists_them(made):
    net = Two(made[2])
    for module in (net.one, net.two):
        sparse_bridge.dataflow(module, "explicit")
    report = sparse_bridge.report()
    assert report.dataflows["explicit"]["Conv"] >= 2
    assert "explicit dataflow given to" in str(report)
    sparse_bridge.dataflow(net.one, None)
    sparse_bridge.dataflow(net.two, None)
    assert override.of(net.one) is None


@pytest.mark.gpu
def test_grouped_on_a_gpu(made):
    found = layer("submanifold", 3, device="cuda")
    x, weight, _, _ = tensors(found, 32, 32, dtype=torch.float16)
    module = Conv(weight).cuda()
    want = module(x.cuda(), found.kmap).double().cpu()
    sparse_bridge.dataflow(module, "grouped")
    assert flows(module, x.cuda(), found.kmap) == ["grouped"]
    assert_close(module(x.cuda(), found.kmap), want, torch.float16)


def test_modules_of_torch_alone_have_nothing_that_takes_a_dataflow():
    for module in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())):
        with pytest.warns(
            UserWarning, match=f"dataflow.. got {type(module).__name__}, in which nothing is sparse"
        ) as said:
            sparse_bridge.dataflow(module, "grouped")
        assert said[0].filename == __file__
        sparse_bridge.dataflow(module, None)
