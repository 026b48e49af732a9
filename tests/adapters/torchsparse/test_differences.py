"""Lines of the page's table of differences that no other file holds."""

from __future__ import annotations

import pytest
import torch

from sparse_bridge.adapters.torchsparse.conv import allow_tf32

from .conftest import speaking
from .test_conv import points


def tensor(ts, channels=4, seed=0):
    coords = points(ts.release, seed=seed)
    return ts.SparseTensor(torch.randn(len(coords), channels), coords)


@pytest.mark.parametrize("kernel, stride", [(3, 1), (2, 2), (1, 1)])
def test_backward_in_eval(ts, kernel, stride):
    layer, x = ts.nn.Conv3d(4, 5, kernel, stride=stride).eval(), tensor(ts)
    x.F.requires_grad_()
    layer(x).F.square().sum().backward()
    assert x.F.grad.abs().sum() > 0 and layer.kernel.grad.abs().sum() > 0


def test_a_second_strided_layer_of_the_same_key(ts):
    """Both write their coordinates under one tensor stride."""
    x = tensor(ts)
    options = {"padding": 1} if ts.release == "2.1" else {}
    layers = [ts.nn.Conv3d(4, 4, 2, stride=2), ts.nn.Conv3d(4, 4, 3, stride=2, **options)]
    alone = [layer(tensor(ts)).C for layer in layers]
    for layer, want in (*zip(layers, alone, strict=True), (layers[1], alone[1])):
        assert torch.equal(layer(x).C, want)


@pytest.mark.parametrize("channels", [1, 1024, 1025, 2500])
def test_voxels_of_many_channels(ts, channels):
    F = ts.nn.functional
    x = torch.randn(6, channels, requires_grad=True)
    index, counts = torch.tensor([0, 1, 0, -1, 1, 1]), torch.tensor([2, 3], dtype=torch.int32)
    y = F.spvoxelize(x, index, counts)
    torch.testing.assert_close(y, torch.stack([x[[0, 2]].mean(0), x[[1, 4, 5]].mean(0)]))
    nearest, one = torch.full((3, 8), -1, dtype=torch.int32), torch.zeros(3, 8)
    nearest[:, 0], one[:, 0] = torch.tensor([1, 0, 1]), 1.0
    z = F.spdevoxelize(y, nearest, one)
    torch.testing.assert_close(z, y[[1, 0, 1]])
    z.sum().backward()
    torch.testing.assert_close(x.grad[1], torch.full((channels,), 2 / 3))


@pytest.mark.parametrize("release", ["1.4", "2.0", "2.1"])
def test_whose_switch_allows_tf32(release):
    from sparse_bridge.adapters.torchsparse import profile

    matmul, device = torch.backends.cuda.matmul, torch.device("cuda")
    before = matmul.allow_tf32
    with speaking(release) as ts:
        try:
            for ours in (False, True):
                matmul.allow_tf32, ts.backends.allow_tf32 = not ours, ours
                got = allow_tf32(profile.current(), device)
                assert got is (ours if release == "2.1" else not ours)
        finally:
            matmul.allow_tf32 = before
