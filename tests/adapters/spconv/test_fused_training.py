"""BatchNorm and ReLU of a container as one operation in training: what it gives, and when not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_bridge.adapters import fusion
from tests.checks import assert_close

from . import apis

pytestmark = [pytest.mark.interpreted, pytest.mark.emulated]


@pytest.fixture(params=["standin", "patch"])
def sp(request, map_lane):
    if request.param == "patch" and map_lane.slow:
        pytest.skip("one api is enough here")
    with apis.APIS[request.param]() as module:
        yield module


@pytest.fixture(autouse=True)
def plain_settings():
    """The lane's settings stay."""


def scene(sp, map_lane, channels=6, rows=60, seed=0):
    x = apis.tensor(sp, channels=channels, rows=rows, seed=seed)
    x.indices = x.indices.to(map_lane.device)
    return x.replace_feature((x.features + 20).to(map_lane.device))


def stack(sp, map_lane, **options):
    """Norms without a convolution: what is compared is the norms' own arithmetic."""
    torch.manual_seed(0)
    net = sp.SparseSequential(
        nn.BatchNorm1d(6, **options),
        nn.ReLU(inplace=True),
        nn.Linear(6, 9),
        nn.BatchNorm1d(9),
        nn.Sigmoid(),
        nn.BatchNorm1d(9),
        nn.ReLU(),
    )
    return net.to(map_lane.device)


def one_by_one(net, x):
    """The modules themselves, in fp64."""
    for module in net.children():
        x = module(x)
    return x


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.7}], ids=str
)
def test_three_steps(sp, map_lane, fused, options):
    net = stack(sp, map_lane, **options)
    want = copy.deepcopy(net).cpu().double()
    optimisers = [torch.optim.SGD(one.parameters(), 0.1) for one in (net, want)]
    for step in range(3):
        x = scene(sp, map_lane, seed=step)
        leaf = x.features.detach().requires_grad_()
        wide = leaf.detach().cpu().double().requires_grad_()
        y, z = net(x.replace_feature(leaf)).features, one_by_one(want, wide)
        precision = "tf32" if step else torch.float32  # parameters drift apart by rounding
        assert_close(y, z, precision)
        for optimiser, result in zip(optimisers, (y, z), strict=True):
            optimiser.zero_grad()
            result.square().mean().backward()
            optimiser.step()
        assert_close(leaf.grad, wide.grad, "tf32")
    assert fused == [True, False, True] * 3
    for name, value in want.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name].cpu().double(), value.double(), rtol=1e-3, atol=1e-4)
    if want[0].num_batches_tracked is not None:
        assert net[0].num_batches_tracked == want[0].num_batches_tracked == 3


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def nothing(*args):
    return None


GLOBAL = {
    "forward": torch_module.register_module_forward_hook,
    "forward pre": torch_module.register_module_forward_pre_hook,
    "backward": torch_module.register_module_full_backward_hook,
    "backward pre": torch_module.register_module_full_backward_pre_hook,
}
HOOKS = {
    "forward": nn.Module.register_forward_hook,
    "forward pre": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward pre": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_see_every_module(sp, map_lane, fused, kind):
    for place, left in ((0, [False, True]), (1, [False, False, True])):
        net, seen = stack(sp, map_lane), []
        net[1].inplace = False  # torch's own hooks on gradients forbid it
        HOOKS[kind](net[place], lambda *args, seen=seen: seen.append(len(args)))
        x = scene(sp, map_lane)
        net(x.replace_feature(x.features.requires_grad_())).features.sum().backward()
        assert fused == left and len(seen) == 1
        fused.clear()


@pytest.mark.parametrize("kind", GLOBAL)
def test_hooks_on_all_modules(sp, map_lane, fused, kind):
    net, x = stack(sp, map_lane), scene(sp, map_lane)
    net[1].inplace = False
    handle = GLOBAL[kind](nothing)
    try:
        net(x)
    finally:
        handle.remove()
    assert fused == []
    net(x)
    assert fused == [True, False, True]


@pytest.mark.parametrize("how", ["forward", "subclass", "eval", "replaced", "patched", "relu"])
def test_other_layers_run_themselves(sp, map_lane, fused, monkeypatch, how):
    net, x = stack(sp, map_lane), scene(sp, map_lane)
    before, left = copy.deepcopy(net), [False, True]
    if how == "forward":
        net[0].forward = lambda x, own=net[0].forward: own(x)
    elif how == "subclass":
        net[0].__class__ = type("Norm", (nn.BatchNorm1d,), {})
    elif how == "eval":
        net[0].eval()
        before[0].eval()
    elif how == "replaced":
        weight = net[0].weight.detach() * 1
        del net[0].weight
        net[0].weight = weight
    elif how == "patched":
        original = nn.BatchNorm1d.forward
        monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: original(self, x))
        left = []
    else:
        net[1].forward = lambda x, own=net[1].forward: own(x)
        left = [False, False, True]
    found = net(x).features
    assert fused == left
    assert_close(found, one_by_one(before.cpu().double(), x.features.cpu().double()))


def test_watched_operations_and_transforms(sp, map_lane, fused):
    net, x = stack(sp, map_lane), scene(sp, map_lane)
    with Watching():
        net(x)
    with torch.autograd.forward_ad.dual_level():
        net(x)
    parameters = dict(net.named_parameters())

    def loss(parameters):
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        return torch.func.functional_call(net, (parameters, buffers), (x,)).features.sum()

    gradients = torch.func.grad(loss)(parameters)
    assert fused == [] and all(g.isfinite().all() for g in gradients.values())
    loss(parameters)
    assert fused == [True, False, True]


def test_fp64_and_single_rows_fail_or_run_as_ever(sp, map_lane, fused):
    net, x = stack(sp, map_lane), scene(sp, map_lane, rows=1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        net(x)
    fused.clear()
    net.double()
    wide = scene(sp, map_lane)
    net(wide.replace_feature(wide.features.double()))
    assert fused == []


def test_without_gradients_statistics_move_all_the_same(sp, map_lane, fused):
    net, x = stack(sp, map_lane), scene(sp, map_lane)
    want = copy.deepcopy(net).cpu().double()
    with torch.no_grad():
        assert_close(net(x).features, one_by_one(want, x.features.cpu().double()))
    assert fused == [True, False, True]
    assert_close(net[0].running_mean, want[0].running_mean)
    assert_close(net[0].running_var, want[0].running_var)


def test_autocast(sp, map_lane, fused):
    """Halves between convolution and norm, statistics and parameters in fp32."""
    torch.manual_seed(0)
    net = sp.SparseSequential(
        sp.SubMConv3d(6, 16, 3, bias=False),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        sp.SubMConv3d(16, 8, 3, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
    ).to(map_lane.device)
    want, x = copy.deepcopy(net), scene(sp, map_lane)
    results = []
    for one, watched in ((net, False), (want, True)):
        handle = torch_module.register_module_forward_hook(nothing) if watched else None
        with torch.autocast(map_lane.device, torch.float16):
            y = one(x)
        if handle is not None:
            handle.remove()
        y.features.float().square().sum().backward()
        assert y.features.dtype == torch.float16
        results.append(y)
    assert fused == [True, True]
    assert_close(results[0].features, results[1].features, torch.float16)
    for name, parameter in want.named_parameters():
        assert parameter.dtype == torch.float32
        got = net.get_parameter(name).grad
        scale = parameter.grad.square().mean().sqrt()
        assert (got - parameter.grad).square().mean().sqrt() < 2e-2 * scale, name
    for name, value in want.state_dict().items():
        assert_close(net.state_dict()[name], value, torch.float16, name)


def test_cpu_tensors_without_kernels_are_left_alone(monkeypatch, map_lane):
    if map_lane.kernels:
        pytest.skip("kernels are there")
    monkeypatch.setattr(fusion, "batch_norm_training", None)
    with apis.standin() as sp:
        net = stack(sp, map_lane)
        net(scene(sp, map_lane)).features.sum().backward()
