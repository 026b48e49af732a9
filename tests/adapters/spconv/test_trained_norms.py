"""Norms of torch that programs call on features in training: by kernels once it is known whose
features they take, with torch's results."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sparse_bridge
from sparse_bridge import hooks, settings
from sparse_bridge.core.conv import deferred
from sparse_bridge.core.conv.history import histories
from tests.checks import assert_close
from tests.clouds import cloud

from . import apis

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]

SHAPE = (8, 9, 7)


class Block(nn.Module):
    """A residual block in spconv's idiom, behind a layer."""

    def __init__(self, sp, **options):
        super().__init__()
        self.first = sp.SubMConv3d(4, 8, 3, bias=False, indice_key="a")
        self.conv = sp.SubMConv3d(8, 8, 3, bias=False, indice_key="a")
        self.one = sp.SubMConv3d(8, 8, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm1d(8, **options), nn.BatchNorm1d(8)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.first(x)
        y = self.conv(x)
        y = y.replace_feature(self.relu(self.norm1(y.features)))
        skip = self.norm2(self.one(x).features)
        return y.replace_feature(self.relu(y.features + skip))


@pytest.fixture(params=["standin", "patch"])
def sp(request, kernel_lane):
    if request.param == "patch" and kernel_lane.slow:
        pytest.skip("one api is enough here")
    with apis.APIS[request.param]() as module:
        yield module
    deferred.reset()


@pytest.fixture
def torchs(calls_of, monkeypatch):
    """How often torch normalises."""
    calls = calls_of(torch, "batch_norm")
    monkeypatch.setattr(hooks, "TORCHS_BATCH_NORM", torch.batch_norm)  # or nothing would be fused
    return calls


def block(sp, lane, **options):
    torch.manual_seed(0)
    return Block(sp, **options).to(lane.device).train()


def scene(sp, lane, seed=0):
    coords = cloud(SHAPE, share=0.3, seed=seed).to(lane.device)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(len(coords), 4, generator=random).to(lane.device)
    return sp.SparseConvTensor(x, coords, list(SHAPE), 2)


def step(net, x, optimiser=None):
    net.zero_grad()
    y = net(x).features
    y.square().mean().backward()
    if optimiser is not None:
        optimiser.step()
    return y.detach()


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"eps": 0.1}], ids=str)
def test_steps(sp, kernel_lane, torchs, options):
    """As a copy whose norms are torch's: results, gradients, statistics."""
    net = block(sp, kernel_lane, **options)
    clone = copy.deepcopy(net)
    optimisers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, clone)]
    for turn in range(4):
        torchs.clear()
        y = step(net, scene(sp, kernel_lane, turn), optimisers[0])
        assert len(torchs) == (0 if turn else 2)
        with settings.override(optimize="off"):
            z = step(clone, scene(sp, kernel_lane, turn), optimisers[1])
        assert_close(y, z.double(), "tf32")
        for mine, theirs in zip(net.parameters(), clone.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad.double(), "tf32")
    for name, value in clone.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert with_fast_forward(net) == ["norm1", "norm2"]
    sparse_bridge.disable()
    assert with_fast_forward(net) == []


def with_fast_forward(net):
    return [name for name, one in net.named_children() if "forward" in one.__dict__]


def test_features_are_plain_from_the_third_call_on(sp, kernel_lane):
    layer = block(sp, kernel_lane).first
    kinds = [type(layer(scene(sp, kernel_lane)).features) for _ in range(3)]
    assert kinds == [deferred.ProfiledFeatures, deferred.ProfiledFeatures, torch.Tensor]
    with torch.no_grad():
        fresh = block(sp, kernel_lane).first
        assert type(fresh(scene(sp, kernel_lane)).features) is not deferred.ProfiledFeatures


def test_gradients_asked_for_in_inference_mode(sp, kernel_lane):
    net = block(sp, kernel_lane)
    clone = copy.deepcopy(net.norm1)
    for turn in range(2):
        step(net, scene(sp, kernel_lane, turn))
    net.norm1.load_state_dict(clone.state_dict())
    with torch.inference_mode():
        y = net.conv(net.first(scene(sp, kernel_lane))).features
        with torch.enable_grad():
            found, want = net.norm1(y), clone(y)
    assert found.is_inference() and not found.requires_grad
    assert_close(found, want.double(), "tf32")
    assert with_fast_forward(net) == ["norm1", "norm2"]
    assert int(net.norm1.num_batches_tracked) == 1


class Marked(torch.Tensor):
    """A class of a program's own."""


def test_classes_of_a_programs_own(sp, kernel_lane):
    layer = block(sp, kernel_lane).first
    y = layer(scene(sp, kernel_lane)).features
    other = torch.ones_like(y).as_subclass(Marked)
    for made in (y + other, other + y, torch.cat([y, other])):
        assert type(made) is Marked
    assert torch.equal((y + other).as_subclass(torch.Tensor), y + 1)


def test_whoever_reads_sees_the_features(sp, kernel_lane):
    layer = block(sp, kernel_lane).first
    y = layer(scene(sp, kernel_lane)).features
    plain = y.plain
    assert type(y) is deferred.ProfiledFeatures and isinstance(y, torch.Tensor)
    assert type(y + 1) is type(torch.cat([y, y])) is type(y.detach()) is torch.Tensor
    assert torch.equal(y, plain) and torch.equal(torch.stack([y, y])[1], plain)
    assert y.shape == plain.shape and y.grad_fn is plain.grad_fn and y.requires_grad
    assert torch.equal(pickle.loads(pickle.dumps(y.detach())), plain)
    seen = []
    y.register_hook(seen.append)
    y.retain_grad()
    (y * 2).sum().backward()
    assert torch.equal(y.grad, torch.full_like(plain, 2)) and torch.equal(seen[0], y.grad)
    layer.weight.grad = None
    y = layer(scene(sp, kernel_lane)).features
    before = y.plain.detach().clone()
    y.relu_()
    assert torch.equal(y.plain, before.relu())
    y.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["eval", "hooks of saved tensors", "mode", "off", "dtype", "copy"])
def test_when_torchs_own_is_called(sp, kernel_lane, torchs, how):
    net = block(sp, kernel_lane)
    for turn in range(2):
        step(net, scene(sp, kernel_lane, turn))
    norm = net.norm1
    x = torch.randn(20, 8, device=kernel_lane.device)
    torchs.clear()
    norm(x)
    assert not torchs
    if how == "eval":
        norm.eval()(x)
    elif how == "hooks of saved tensors":
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            norm(x)
    elif how == "mode":
        with Watching():
            norm(x)
    elif how == "off":
        with settings.override(optimize="off"):
            norm(x)
    elif how == "dtype":
        norm.double()(x.double())
    else:
        shallow = copy.copy(norm)
        shallow.training = False
        assert torch.equal(shallow(x), nn.BatchNorm1d.forward(shallow, x))
    assert torchs


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(sp, kernel_lane, reentrant):
    """What is computed twice is computed the same way, also when it is about to be found out."""
    net = block(sp, kernel_lane)
    clone = copy.deepcopy(net)

    def run(x, features):
        return net(x.replace_feature(features)).features

    for turn in range(4):
        x = scene(sp, kernel_lane, turn)
        leaf = x.features.clone().requires_grad_()
        net.zero_grad()
        checkpoint(run, x, leaf, use_reentrant=reentrant).square().mean().backward()
        with settings.override(optimize="off"):
            step(clone, x)
        for mine, theirs in zip(net.parameters(), clone.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad.double(), "tf32")
        if turn == 1:
            for seed in range(2):  # known from here on
                step(net, scene(sp, kernel_lane, seed))
                with settings.override(optimize="off"):
                    step(clone, scene(sp, kernel_lane, seed))


def test_copies_and_files(sp, kernel_lane, torchs):
    net = block(sp, kernel_lane)
    for turn in range(2):
        step(net, scene(sp, kernel_lane, turn))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net.norm1))):
        norm = getattr(other, "norm1", other)
        before = norm.running_mean.clone()
        x = torch.randn(20, 8, device=kernel_lane.device) + 5
        expected = nn.BatchNorm1d(8).to(kernel_lane.device)
        expected.load_state_dict(net.norm1.state_dict())
        assert_close(norm(x), expected(x).double(), "tf32")
        torch.testing.assert_close(norm.running_mean, expected.running_mean)
        assert not torch.equal(norm.running_mean, before)


def test_layers_are_forgotten(sp, kernel_lane):
    gc.collect()
    before = len(histories)
    layer = block(sp, kernel_lane).first
    layer(scene(sp, kernel_lane))
    assert len(histories) == before + 1
    del layer
    gc.collect()
    assert len(histories) == before


def test_containers_fuse_from_the_first_step(sp, kernel_lane, torchs):
    conv = sp.SubMConv3d(4, 8, 3, bias=False, indice_key="a")
    net = sp.SparseSequential(conv, nn.BatchNorm1d(8), nn.ReLU()).to(kernel_lane.device)
    step(net, scene(sp, kernel_lane))
    assert not torchs
