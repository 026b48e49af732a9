"""An empty scene: every parameter has a gradient, of zeros, or DDP would wait for it for ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_bridge

WIDTHS = {"encoder": (6, 8), "decoder": (8, 6), "stem": 4}


def spconv_network() -> nn.Module:
    import spconv.pytorch as spconv

    from sparse_bridge.tools.networks.spconv import ResidualUNet

    return ResidualUNet(spconv, 3, 5, blocks=(1, 1), **WIDTHS)


def torchsparse_network() -> nn.Module:
    import torchsparse

    from sparse_bridge.tools.networks.torchsparse import ResidualUNet

    return ResidualUNet(torchsparse, 3, 5, blocks=(1,) * 4, **WIDTHS)


def minkowski_network() -> nn.Module:
    import MinkowskiEngine as ME

    from sparse_bridge.tools.networks.minkowski import MinkUNet

    return MinkUNet(ME, 3, 5, layers=(1,) * 8, planes=(4,) * 8, init=4)


def spconv_layers() -> nn.Module:
    """Ordinary layers that a `SparseSequential` leaves out."""
    import spconv.pytorch as spconv

    layers = nn.Linear(4, 4), nn.PReLU(), nn.LayerNorm(4), nn.BatchNorm1d(4, affine=False)
    return spconv.SparseSequential(spconv.SubMConv3d(3, 4, 3), *layers, spconv.SubMConv3d(4, 5, 3))


def minkowski_layers() -> nn.Module:
    import MinkowskiEngine as ME

    layers = ME.MinkowskiLinear(4, 4), ME.MinkowskiPReLU(), ME.MinkowskiInstanceNorm(4)
    conv = ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=3)
    return nn.Sequential(conv, *layers, ME.MinkowskiChannelwiseConvolution(4, 3, dimension=3))


NETWORKS = {
    "spconv": (spconv_network, spconv_layers),
    "torchsparse": (torchsparse_network,),
    "minkowski": (minkowski_network, minkowski_layers),
}
CASES = [(name, make) for name, makers in NETWORKS.items() for make in makers]


def empty(name: str) -> object:
    coords, features = torch.empty(0, 4, dtype=torch.int32), torch.empty(0, 3)
    if name == "spconv":
        import spconv.pytorch as spconv

        return spconv.SparseConvTensor(features, coords, [16, 16, 16], 1)
    if name == "torchsparse":
        import torchsparse

        return torchsparse.SparseTensor(features, coords)
    import MinkowskiEngine as ME

    return ME.SparseTensor(features, coords)


def features_of(x: object) -> torch.Tensor:
    return x.features if hasattr(x, "features") and not hasattr(x, "F") else x.F


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "make"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_every_parameter_has_a_gradient(name: str, make, dtype: torch.dtype | None) -> None:
    with sparse_bridge.enable(name):
        network = make()
        buffers = [buffer.clone() for buffer in network.buffers() if buffer.is_floating_point()]
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = features_of(network(empty(name)))
        assert len(y) == 0
        y.float().sum().backward()
        for title, parameter in network.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), title
        after = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
        assert all(torch.equal(a, b) for a, b in zip(buffers, after, strict=True))


def test_joint_statistics_are_taken_of_no_rows() -> None:
    """The other ranks wait for this one's."""
    with sparse_bridge.enable("spconv"):
        import spconv.pytorch as spconv

        network = spconv.SparseSequential(spconv.SubMConv3d(3, 4, 3), nn.BatchNorm1d(4))
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        calls = []
        network[1].register_forward_hook(lambda *_: calls.append(1))
        network(empty("spconv"))
        assert calls == [1]
        network.eval()(empty("spconv"))
        assert calls == [1]
