"""torch.nn.Sequential over sparse tensors: fused in inference, where nobody could notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.adapters import fusion
from sparse_bridge.adapters.torchsparse import conv
from sparse_bridge.adapters.torchsparse.sequence import expected
from sparse_bridge.core.warmup import compilation
from tests import checks

from .conftest import speaking
from .test_layers import tensor


@pytest.fixture
def norms(calls_of):
    """Calls of the norms in eval mode that ran for themselves."""
    return calls_of(fusion, "batch_norm_inference")


def network(ts):
    """conv norm relu, 1x1 conv norm leaky, strided conv norm, norm."""
    torch.manual_seed(0)
    L = ts.nn
    layers = [
        L.Conv3d(6, 8, 3),
        L.BatchNorm(8),
        L.ReLU(True),
        L.Conv3d(8, 8, 1),
        L.BatchNorm(8),
        L.LeakyReLU(0.1),
        L.Conv3d(8, 4, 2, 2, bias=True),
        L.BatchNorm(4),
        L.BatchNorm(4),
    ]
    net = nn.Sequential(*layers)
    for _ in range(3):  # statistics that mean something
        net(tensor(ts))
    return net.eval()


def one_by_one(net, x):
    for layer in net:
        x = layer(x)
    return x


def test_norms_and_activations_go_into_the_convolution(ts, norms):
    net, x = network(ts), tensor(ts)
    with torch.no_grad():
        want = one_by_one(net, x)
        norms.clear()
        got = net(x)
        assert [layer for layer, *_ in norms] == [net[4], net[8]], "behind the matrix product and behind another norm"
        checks.assert_close(got.F, want.F, torch.float32)
    assert got.C is want.C and got.s == want.s
    norms.clear()
    assert torch.equal(net(x).F, one_by_one(net, x).F) and len(norms) == 8, "gradients are wanted"


def test_statistics_and_parameters_of_the_moment_count(ts):
    net, x = network(ts), tensor(ts)
    with torch.no_grad():
        net(x)
        net[1].running_var.mul_(3)
        net[7].weight.neg_()
        checks.assert_close(net(x).F, one_by_one(net, x).F, torch.float32)
        net[1].train()
        before = net[1].num_batches_tracked.clone()
        net(x)
        assert net[1].num_batches_tracked == before + 1


def _hook(net, ts):
    net[1].register_forward_hook(lambda module, args, out: None)


def _replaced(net, ts):
    net[1].forward = lambda x: x


def _replaced_convolution(net, ts):
    own = net[0].forward
    net[0].forward = lambda x: own(own_doubled(x))


def own_doubled(x):
    x.F = 2 * x.F
    return x


def _subclass(net, ts):
    class Doubled(ts.nn.BatchNorm):
        def forward(self, x):
            return super().forward(own_doubled(x))

    net[1].__class__ = Doubled


def _subclass_convolution(net, ts):
    class Doubled(ts.nn.Conv3d):
        def forward(self, x):
            y = super().forward(x)
            return own_doubled(y)

    net[0].__class__ = Doubled


def _activation(net, ts):
    class Clipped(ts.nn.ReLU):
        def forward(self, x):
            x.F = x.F.clamp(max=0.1)
            return super().forward(x)

    net[2] = Clipped()


@pytest.mark.parametrize(
    "change", [_hook, _replaced, _replaced_convolution, _subclass, _subclass_convolution, _activation]
)
def test_whoever_watches_or_replaces_a_layer_sees_it_run(ts, change):
    net = network(ts)
    change(net, ts)
    with torch.no_grad():
        torch.manual_seed(1)
        want = one_by_one(net, tensor(ts))
        torch.manual_seed(1)
        got = net(tensor(ts))
    checks.assert_close(got.F, want.F, torch.float32)


def test_a_hook_is_called(ts):
    net, seen = network(ts), []
    net[1].register_forward_hook(lambda module, args, out: seen.append(args[0].F.clone()))
    x = tensor(ts)
    with torch.no_grad():
        net(x)
        assert torch.equal(seen[0], net[0](x).F)


def test_whoever_replaces_conv3d(ts, monkeypatch):
    net, F = network(ts), ts.nn.functional
    own = F.conv3d
    monkeypatch.setattr(F, "conv3d", lambda *args, **kwargs: own_doubled(own(*args, **kwargs)))
    with torch.no_grad():
        torch.manual_seed(1)
        want = one_by_one(net, tensor(ts))
        torch.manual_seed(1)
        checks.assert_close(net(tensor(ts)).F, want.F, torch.float32)


def test_other_containers_are_as_ever():
    before = nn.Sequential.forward
    with speaking(None):
        assert nn.Sequential.forward is not before
        net, x = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()).eval(), torch.ones(2, 3))
        want = before(net, x)
        with torch.no_grad():
            assert torch.equal(net(x), want)
        for made in (torch.jit.script(net), torch.jit.trace(net, x), torch.fx.symbolic_trace(net)):
            assert torch.equal(made(x), want)
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), want)
    assert nn.Sequential.forward is before
    assert not sparse_bridge.status()["torchsparse"].enabled


def test_the_warm_up_is_told(ts):
    net = network(ts)
    with torch.no_grad():
        first, last = expected(net)
        (between,) = conv.expected(net[3])
    assert between.pointwise and between.epilogue.norm is None, "a plain matrix product"
    assert first.layer is net[0] and last.layer is net[6]
    assert first.epilogue.activation == "relu" and last.epilogue.activation is None
    assert first.epilogue.norm.mean is net[1].running_mean
    assert last.epilogue.bias.data_ptr() == net[6].bias.data_ptr()
    assert list(expected(net)) == [], "gradients are wanted"
    assert net in compilation._described
