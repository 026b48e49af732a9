"""Weights under autocast in training are cast together, and as torch casts each."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from sparse_bridge.core.conv import weight_casts
from sparse_bridge.core.conv.convolution import conv
from tests.core.layers import layer

V, CHANNELS = 9, 5  # a matrix's values are no multiple of what starts are aligned to


class Net(nn.Module):
    """Submanifold layers over one map, each with a weight of its own."""

    def __init__(self, layers=4, channels=CHANNELS, device="cpu"):
        super().__init__()
        made = torch.Generator().manual_seed(layers)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(V, channels, channels, generator=made).to(device) / 8) for _ in range(layers)
        )
        self.kmap = layer("submanifold", 2, device=device).kmap
        self.x = torch.randn(self.kmap.n_in, channels, generator=made).to(device)

    def forward(self, dtype=torch.bfloat16, between=None, skip=()):
        y = self.x
        with torch.autocast(self.x.device.type, dtype):
            for i, weight in enumerate(self.weights):
                if i not in skip:
                    y = conv(y, weight, None, self.kmap)
                if between is not None:
                    between(i)
        return y

    def step(self, **options):
        """(result, gradients) of a step, behind which weights have changed."""
        y = self(**options)
        y.float().square().mean().backward()
        grads = [w.grad for w in self.weights]
        with torch.no_grad():
            for w in self.weights:
                if w.grad is not None:
                    w.add_(w.grad, alpha=-0.1)
                w.grad = None
        return y, grads


@pytest.fixture(autouse=True)
def forgotten():
    weight_casts.reset()
    yield
    weight_casts.reset()


@pytest.fixture
def together(monkeypatch):
    """Numbers of weights that were cast in one launch, in turn."""
    seen, own = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (seen.append(len(of)), own(to, of))[1])
    return seen


def alone(net, steps, **options):
    """What the same steps make where every layer casts its weight itself."""
    twin = copy.deepcopy(net)
    for w in twin.weights:
        w.moved_by_an_engine = True
    return [twin.step(**options) for _ in range(steps)]


def assert_same(made, wanted):
    for (y, grads), (z, others) in zip(made, wanted, strict=True):
        assert torch.equal(y, z)
        for a, b in zip(grads, others, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_from_the_second_step_on_together(together, dtype):
    net = Net()
    wanted = alone(net, 4, dtype=dtype)
    assert not together
    assert_same([net.step(dtype=dtype) for _ in range(4)], wanted)
    assert together == [4, 4, 4]


def test_casts_start_where_kernels_read_fast(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: seen.extend(zip(to, of, strict=True)))
    net = Net()
    net.step()
    net()
    assert len(seen) == 4 and len({cast.untyped_storage().data_ptr() for cast, _ in seen}) == 1
    for cast, weight in seen:
        assert cast.storage_offset() * cast.element_size() % 256 == 0
        assert cast.is_contiguous() and cast.shape == weight.shape


@pytest.mark.parametrize("change", ["add_", "set_", "copy"])
def test_a_weight_that_changes_before_its_layer_is_called(together, change):
    def between(i, weights):
        if i != 1:
            return
        w = weights[2]
        with torch.no_grad():
            if change == "add_":
                w.add_(1)
            elif change == "set_":
                w.data = w.data + 1
            else:
                weights[2] = nn.Parameter(w + 1)

    net = Net()
    twin = copy.deepcopy(net)
    for w in twin.weights:
        w.moved_by_an_engine = True
    for _ in range(3):
        y, _ = net.step(between=lambda i: between(i, net.weights))
        z, _ = twin.step(between=lambda i: between(i, twin.weights))
        assert torch.equal(y, z)
    assert together


def test_a_change_behind_a_backward_pass_that_no_version_tells(together):
    """As optimizers do that write by address."""
    net, skip = Net(), ()
    twin = copy.deepcopy(net)
    for w in twin.weights:
        w.moved_by_an_engine = True
    for skip in ((), (0,), (1, 2), (), (3,), ()):
        y, _ = net.step(skip=skip)
        z, _ = twin.step(skip=skip)
        assert torch.equal(y, z)
        for one in (net, twin):
            for w in one.weights:
                w.data.mul_(0.5)
    assert together


def test_a_weight_twice_in_a_pass(together):
    net = Net()
    net.weights.append(net.weights[1])
    wanted = alone(net, 3)
    assert_same([net.step() for _ in range(3)], wanted)
    assert together == [4, 4]


def test_checkpoints_and_passes_without_gradients(together):
    from torch.utils.checkpoint import checkpoint

    net = Net()
    wanted = alone(net, 3)
    made = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(net, use_reentrant=False)
            with torch.no_grad():
                assert torch.equal(net(), y)
        y.float().square().mean().backward()
        made.append((y, [w.grad for w in net.weights]))
        with torch.no_grad():
            for w in net.weights:
                w.add_(w.grad, alpha=-0.1)
                w.grad = None
    assert_same(made, wanted)
    assert together == [4, 4]  # not in the backward pass, which computes again


def test_what_is_not_cast_together(together):
    net = Net(7)
    net.weights[0].ds_id = 7  # an engine's
    net.weights[1] = nn.Parameter(net.weights[1].detach().mT)  # not one row after another
    with torch.inference_mode():
        frozen = torch.randn(V, CHANNELS, CHANNELS)
    net.weights[2] = nn.Parameter(frozen, requires_grad=False)
    for _ in range(3):
        net.step()
    assert together == [4, 4]
    net.weights[3].untyped_storage().resize_(0)  # as engines do that share a weight out
    net.step(skip=(3,))
    assert together == [4, 4, 3]


def test_nothing_is_kept_alive():
    net = Net()
    net.step()
    net(skip=(2,))
    seen = [weakref.ref(w) for w in net.weights]
    del net
    gc.collect()
    assert not any(one() is not None for one in seen)


def test_two_networks_in_turn(together):
    nets = [Net(), Net(3)]
    wanted = [alone(net, 4) for net in nets]
    made = [[], []]
    for _ in range(4):
        for mine, net in zip(made, nets, strict=True):
            mine.append(net.step())
    for mine, theirs in zip(made, wanted, strict=True):
        assert_same(mine, theirs)


@pytest.mark.gpu
def test_streams_and_graphs(together):
    net = Net(device="cuda", channels=16)
    wanted = alone(net, 5)
    made, side = [net.step(), net.step()], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made += [net.step(), net.step()]
    torch.cuda.current_stream().wait_stream(side)
    made.append(net.step())
    torch.cuda.synchronize()
    assert_same(made, wanted)
    assert together == [4, 4, 4]  # the first step of each stream casts alone
    graph, y = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        y = net()
    before = net().detach().clone()
    with torch.no_grad():
        for w in net.weights:
            w.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, net()) and not torch.equal(y, before)
