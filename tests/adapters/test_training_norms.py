"""BatchNorm and ReLU layers of the frameworks as one operation in training: values, gradients and
statistics of the layers one by one, whoever looks."""

from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import sparse_bridge
from sparse_bridge.adapters import protocol
from sparse_bridge.core.conv import history
from tests.checks import assert_close
from tests.clouds import cloud
from tests.releases import since

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.emulated,
    since(2, 8, "what follows a norm in training is not foreseen"),
]

CHANNELS = 6


class Torchsparse:
    name, norm = "torchsparse", staticmethod(lambda layer: layer)

    @staticmethod
    def stack(inplace=False):
        import torchsparse.nn as spnn

        return nn.Sequential(
            spnn.BatchNorm(CHANNELS),
            spnn.ReLU(inplace),
            spnn.BatchNorm(CHANNELS),
            spnn.LeakyReLU(),
            spnn.BatchNorm(CHANNELS),
            spnn.ReLU(inplace),
        )

    @staticmethod
    def tensor(feats, coords):
        import torchsparse

        return torchsparse.SparseTensor(feats, coords)


class Minkowski:
    name, norm = "minkowski", staticmethod(lambda layer: layer.bn)

    @staticmethod
    def stack(inplace=False):
        import MinkowskiEngine as ME

        return nn.Sequential(
            ME.MinkowskiBatchNorm(CHANNELS),
            ME.MinkowskiReLU(inplace),
            ME.MinkowskiBatchNorm(CHANNELS),
            ME.MinkowskiLeakyReLU(),
            ME.MinkowskiBatchNorm(CHANNELS),
            ME.MinkowskiReLU(inplace),
        )

    @staticmethod
    def tensor(feats, coords):
        import MinkowskiEngine as ME

        return ME.SparseTensor(feats, coords)


@pytest.fixture(params=[Torchsparse, Minkowski], ids=lambda kind: kind.name)
def api(request, map_lane):
    with sparse_bridge.enable(request.param.name, mode="standin"):
        request.param.scene = staticmethod(functools.partial(scene, request.param, map_lane.device))
        yield request.param


def scene(api, device, seed=0, rows=60, grad=True):
    coords = cloud((7, 8, 9), 2, rows / 504, seed)
    generator = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(coords), CHANNELS, generator=generator) + 3
    return api.tensor(feats.to(device).requires_grad_(grad), coords.to(device))


def rows(x):
    return protocol.features_of(x)


def in_torch(net, x):
    """The same layers of torch, in fp64, with the same parameters and statistics."""
    found = nn.Sequential(
        nn.BatchNorm1d(CHANNELS),
        nn.ReLU(),
        nn.BatchNorm1d(CHANNELS),
        nn.LeakyReLU(),
        nn.BatchNorm1d(CHANNELS),
        nn.ReLU(),
    )
    state = {name.replace(".bn", ""): value for name, value in net.state_dict().items()}
    found.load_state_dict(state)
    return found.double()


ALONE, AHEAD = [False] * 3, [True, False, True]


@pytest.mark.parametrize("inplace", [False, True])
def test_steps(api, map_lane, fused, inplace):
    torch.manual_seed(0)
    net = api.stack(inplace).to(map_lane.device)
    want = in_torch(net, None)
    optimisers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, want)]
    for step in range(3):
        x = api.scene(step)
        leaf = rows(x)
        leaf.retain_grad()
        wide = leaf.detach().cpu().double().requires_grad_()
        y, z = rows(net(x)), want(wide)
        assert_close(y, z, "tf32" if step else torch.float32)
        for optimiser, result in zip(optimisers, (y, z), strict=True):
            optimiser.zero_grad()
            result.square().mean().backward()
            optimiser.step()
        assert_close(leaf.grad, wide.grad, "tf32")
    assert fused == ALONE + 2 * AHEAD
    state = {name.replace(".bn", ""): value for name, value in net.state_dict().items()}
    for name, value in want.state_dict().items():
        torch.testing.assert_close(state[name].cpu().double(), value.double(), rtol=1e-3, atol=1e-4)


def learnt(api, map_lane, fused, inplace=False):
    net = api.stack(inplace).to(map_lane.device)
    net(api.scene())
    del fused[:]
    return net


def test_whoever_else_reads_gets_the_norm_alone(api, map_lane, fused):
    net = learnt(api, map_lane, fused)
    norm, relu = net[0], net[1]
    want, batches = in_torch(net, None)[0], int(api.norm(norm).num_batches_tracked)
    x = api.scene(1)
    rows(x).retain_grad()
    wide = rows(x).detach().cpu().double().requires_grad_()
    between = norm(x)
    y, z = relu(between), want(wide)
    with torch.no_grad():
        assert rows(between).requires_grad
    assert_close(rows(between), z)
    assert_close(rows(y), z.relu())
    (rows(y) * 3 + rows(between)).square().sum().backward()
    (z.relu() * 3 + z).square().sum().backward()
    assert_close(rows(x).grad, wide.grad, "tf32")
    assert fused == [True] and int(api.norm(norm).num_batches_tracked) == batches + 1
    relu(norm(api.scene(2)))
    assert fused == [True, False], "who reads once may read again"


def test_every_relu_has_features_of_its_own(api, map_lane, fused):
    net = learnt(api, map_lane, fused)
    between = net[0](api.scene(1))
    one, two = rows(net[1](between)), rows(net[1](between))
    assert fused == [True] and torch.equal(one, two) and one.data_ptr() != two.data_ptr()


def test_what_followed_is_forgotten(api, map_lane, fused):
    """With the norm, and where all is forgotten."""
    net = learnt(api, map_lane, fused)
    history.reset()
    net(api.scene(1))
    assert fused == ALONE
    net(api.scene(2))
    assert fused == ALONE + AHEAD
    key = id(api.norm(net[0]))
    assert key in history.histories
    del net
    gc.collect()
    assert key not in history.histories


def test_in_place_overwrites(api, map_lane, fused):
    for _ in range(2):
        net = learnt(api, map_lane, fused, inplace=True)
        between = net[0](api.scene(1))
        y = net[1](between)
        assert fused == [True] and rows(between) is rows(y)
        assert (rows(y) >= 0).all()


def test_copies_and_pickles(api, map_lane, fused):
    net = learnt(api, map_lane, fused)
    want = in_torch(net, None)[0](rows(api.scene(1)).detach().cpu().double())
    if api is Torchsparse:  # the other framework's tensors hold a manager that is not copied
        with torch.no_grad():
            found = pickle.loads(pickle.dumps(net[0](api.scene(1))))
        assert_close(rows(found), want)
    found = copy.copy(net[0](api.scene(1)))
    assert_close(rows(found), want)
    assert fused[0] is not None


def test_a_change_in_between_is_an_error(api, map_lane, fused):
    """As in torch, where the backward pass says so."""
    net, x = learnt(api, map_lane, fused), api.scene(1)
    base = api.tensor(rows(x) * 1, x.coords)
    between = net[0](base)
    rows(base).zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        rows(between)


def test_hooks_see_what_each_layer_makes(api, map_lane, fused):
    net, seen = learnt(api, map_lane, fused), []
    want = in_torch(net, None)
    net[0].register_forward_hook(lambda layer, given, out: seen.append(rows(out).detach().clone()))
    x = api.scene(1)
    y = rows(net(x))
    assert_close(seen[0], want[0](rows(x).detach().cpu().double()))
    want = in_torch(learnt(api, map_lane, fused), None)
    assert y.isfinite().all() and len(seen) == 1


def test_hooks_on_all_modules(api, map_lane, fused):
    net = learnt(api, map_lane, fused)
    handle = torch_module.register_module_forward_hook(lambda *_: None)
    try:
        net(api.scene(1))
    finally:
        handle.remove()
    assert fused == []
    net(api.scene(1))
    assert fused == AHEAD


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(api, map_lane, fused, reentrant):
    """What is computed again saves what the first call saved."""
    net = api.stack().to(map_lane.device)
    for seed in range(3):
        x = api.scene(seed)
        y = checkpoint(lambda feats, x=x: rows(net(api.tensor(feats, x.coords))), rows(x) * 1, use_reentrant=reentrant)
        y.square().sum().backward()
    if not reentrant:
        assert set(fused) == {False}
    del fused[:]
    net(api.scene())
    assert fused == AHEAD


@pytest.mark.parametrize("how", ["eval", "subclass", "patched", "fp64", "no gradients"])
def test_others_run_as_ever(api, map_lane, fused, monkeypatch, how):
    net, left = learnt(api, map_lane, fused), AHEAD
    x = api.scene(1)
    if how == "eval":
        net[0].eval()
        left = [False, True]
    elif how == "subclass":
        api.norm(net[0]).__class__ = type(
            "Norm", (nn.BatchNorm1d,), {"forward": lambda self, x: x if isinstance(x, torch.Tensor) else copy.copy(x)}
        )
        left = [False, True]
    elif how == "patched":
        original = nn.BatchNorm1d.forward
        monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: original(self, x))
        left = []
    elif how == "fp64":
        net.double()
        x = api.tensor(rows(x).detach().double().requires_grad_(), x.coords)
        left = []
    elif how == "no gradients":
        left = ALONE
    want = in_torch(net, None)
    want[0].train(net[0].training)
    with torch.set_grad_enabled(how != "no gradients"):
        found = rows(net(x))
    assert fused == left
    if how == "subclass":
        want = want[1:]
    assert_close(found, want(rows(x).detach().cpu().double()))
