"""Published networks, forward and backward, against an oracle in place of `F.conv3d`."""

from __future__ import annotations

import pytest
import torch

from tests import checks
from tests.clouds import cloud

from . import networks, oracle
from .conftest import DEVICES


def lidar(release, n=160, seed=0, dtype=torch.float64):
    """Points (float coordinates with the batch index where the release has it) and features."""
    generator = torch.Generator().manual_seed(seed)
    xyz = torch.rand(n, 3, generator=generator) * torch.tensor([34.0, 20.0, 18.0])
    batch = torch.randint(0, 2, (n, 1), generator=generator).float()
    feats = torch.randn(n, 4, generator=generator).to(dtype)
    return torch.cat([batch, xyz] if release == "2.1" else [xyz, batch], 1), feats


def voxels(ts, device="cpu"):
    coords = cloud((20, 18, 17), 2, 0.03, seed=1)
    coords = coords if ts.release == "2.1" else coords[:, [1, 2, 3, 0]].contiguous()
    feats = torch.randn(len(coords), 4, dtype=torch.float64)
    return ts.SparseTensor(feats.to(device).requires_grad_(), coords.to(device))


def compare(ts, monkeypatch, net, inputs):
    """Both runs see the same weights, inputs and dropout masks."""
    results = []
    for conv in (None, oracle.Convolution(ts)):
        if conv is not None:
            monkeypatch.setattr(ts.nn.functional, "conv3d", conv)
        for module in net.modules():  # running statistics start over
            if hasattr(module, "reset_running_stats"):
                module.reset_running_stats()
        net.zero_grad()
        torch.manual_seed(5)
        leaves, y = inputs(net)
        up = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(6))
        y.backward(up.to(y.device))
        grads = {name: p.grad.clone() for name, p in net.named_parameters()}
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        results.append((y.detach(), [leaf.grad for leaf in leaves], grads, buffers))
    monkeypatch.undo()
    assert conv.calls > 20 or not isinstance(net, networks.MinkUNet)
    (y, leaves, grads, buffers), (want, other_leaves, other, others) = results
    checks.assert_close(y, want, torch.float64, "output")
    scale = max(g.abs().max().item() for g in other.values())
    for name, grad in grads.items():
        assert (grad - other[name]).abs().max().item() <= 1e-9 * scale, name
    for one, two in zip(leaves, other_leaves, strict=True):
        checks.assert_close(one, two, torch.float64, "input gradient")
    for name, value in buffers.items():
        torch.testing.assert_close(value, others[name])


@pytest.mark.parametrize("device", DEVICES)
def test_minkunet(ts, monkeypatch, device):
    """spvnas's keywords on every release."""
    net = networks.MinkUNet(ts).double().to(device)

    def inputs(net):
        torch.manual_seed(7)
        x = voxels(ts, device)
        leaf = x.F
        x.F = x.F * 1
        return [leaf], net(x)

    compare(ts, monkeypatch, net, inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_mmdetection3d_minkunet(ts14, monkeypatch, device):
    """Positional arguments of 1.4."""
    ts14.release = "1.4"
    net = networks.MinkUNet(ts14, positional=True).double().to(device)

    def inputs(net):
        torch.manual_seed(8)
        x = voxels(ts14, device)
        leaf = x.F
        x.F = x.F * 1
        return [leaf], net(x)

    compare(ts14, monkeypatch, net, inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("positional", [True, False])
def test_old_spvcnn(ts14, monkeypatch, device, positional):
    ts14.release = "1.4"
    net = networks.OldSPVCNN(ts14, positional).double().to(device)
    points, feats = lidar("1.4")

    def inputs(net):
        leaf = feats.clone().to(device).requires_grad_()
        return [leaf], net(points.to(device), leaf)

    compare(ts14, monkeypatch, net, inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_new_spvcnn(ts21, monkeypatch, device):
    ts21.release = "2.1"
    net = networks.NewSPVCNN(ts21).double().to(device)
    points, feats = lidar("2.1")

    def inputs(net):
        leaf = feats.clone().to(device).requires_grad_()
        return [leaf], net(points.to(device), leaf)

    compare(ts21, monkeypatch, net, inputs)


def test_nearest_neighbour_mode(ts14):
    net = networks.OldSPVCNN(ts14)
    points, feats = lidar("1.4", dtype=torch.float32)
    z = net.points(points, feats)
    x = net.initial(z)
    nearest = net.to_points(x, z, nearest=True)
    cells = {tuple(c): f for c, f in zip(x.C.tolist(), x.F, strict=True)}
    for point, feat in zip(torch.floor(points).int().tolist(), nearest.F, strict=True):
        # the weight of the floor corner was divided by the sum over all eight
        ratio = feat / cells[tuple(point)]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("limits", [None, (1, 5, 5, 5)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_direct3d_decoder(ts21, monkeypatch, device, limits):
    ts21.release = "2.1"
    net = networks.Decoder(ts21).double().to(device)
    coords = cloud((5, 5, 5), 1, 0.3, seed=2).to(device)

    def inputs(net):
        torch.manual_seed(9)
        leaf = torch.randn(len(coords), 16, dtype=torch.float64, device=device, requires_grad=True)
        data = ts21.SparseTensor(feats=leaf, coords=coords, stride=1, spatial_range=limits)
        return [leaf], net(networks.Wrapped(data))

    compare(ts21, monkeypatch, net, inputs)


KEYS = {
    "stem.0.0.kernel": (27, 4, 8),
    "stem.0.1.running_mean": (8,),
    "stages.0.0.0.kernel": (8, 8, 8),
    "stages.1.1.net.3.kernel": (27, 12, 12),
    "stages.1.1.downsample.0.kernel": (8, 12),
    "ups.0.0.0.kernel": (8, 16, 16),
    "ups.3.1.0.net.0.kernel": (27, 16, 8),
    "classifier.weight": (5, 8),
}


def test_checkpoints(ts, tmp_path):
    """Upstream's keys and shapes, through a file, into a fresh model that computes the same."""
    net = networks.MinkUNet(ts).double()
    state = {k: tuple(v.shape) for k, v in net.state_dict().items()}
    assert all(state[k] == shape for k, shape in KEYS.items())
    assert not any("weight" in k for k in state if k.endswith(".net.0"))
    torch.manual_seed(10)
    x = voxels(ts)
    net.train()(ts.SparseTensor(x.F.detach(), x.C))
    want = net.eval()(ts.SparseTensor(x.F.detach(), x.C))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    fresh = networks.MinkUNet(ts).double().eval()
    fresh.load_state_dict(torch.load(tmp_path / "net.pt"))
    assert torch.equal(fresh(ts.SparseTensor(x.F.detach(), x.C)), want)


def test_sliced_weights(ts, monkeypatch):
    """SPVNAS's elastic layers hand slices of one kernel to `F.conv3d`, not contiguous."""
    F, x = ts.nn.functional, voxels(ts)
    kernel = torch.randn(27, 9, 12, dtype=torch.float64, requires_grad=True)
    weight = kernel[:, 2:6, 3:12]
    assert not weight.is_contiguous()
    y = F.conv3d(x, weight, 3, None, stride=1, dilation=1, transposed=False)
    y.F.sum().backward()
    grads = kernel.grad.clone(), x.F.grad.clone()
    kernel.grad = x.F.grad = None
    want = oracle.Convolution(ts)(ts.SparseTensor(x.F, x.C), weight, 3)
    want.F.sum().backward()
    checks.assert_close(y.F, want.F, torch.float64)
    for one, other in zip(grads, (kernel.grad, x.F.grad), strict=True):
        checks.assert_close(one, other, torch.float64)
    assert grads[0][:, :2].abs().sum() == 0
