"""The networks that everything takes from one place: layouts, names, and what they may know."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch

import sparse_bridge
import sparse_bridge.networks
from sparse_bridge.networks import minkowski, spconv
from sparse_bridge.networks import torchsparse as for_torchsparse
from tests.adapters.spconv import doors
from tests.clouds import cloud
from tests.door.test_imports import imports_of

FOLDER = pathlib.Path(sparse_bridge.networks.__file__).parent
THIN = {"encoder": (4, 6, 8), "decoder": (8, 6, 4), "stem": 4}


@pytest.fixture(scope="module")
def points():
    coords = cloud((32, 32, 32), 2, 0.01)
    return coords, torch.randn(len(coords), 4)


def test_networks_know_nothing_of_the_bridge_and_import_no_framework():
    files = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
    assert [path.stem for path in files] == ["minkowski", "spconv", "torchsparse"]
    for path in files:
        tops = {name.partition(".")[0] for name in imports_of(path, True)}
        assert tops <= {"__future__", "collections", "itertools", "torch", "typing"}, path


def gradients(network, y):
    y.square().mean().backward()
    return [p.grad for p in network.parameters()]


def test_second(points, plain_settings):
    coords, x = points
    with doors.standin():
        import spconv.pytorch as sp

        network = copy.deepcopy(spconv.Second(sp, widths=(4, 4, 6, 8), out_channels=10))
        y = network(sp.SparseConvTensor(x, coords, [32, 32, 32], 2))
        # z: 32, 16, 8, then padding 0: 3, then a kernel of 3 at stride 2: 1.
        assert y.dense().shape == (2, 10, 1, 4, 4)
        assert all(grad is not None for grad in gradients(network, y.features))
    names = list(network.state_dict())
    assert "conv_input.conv.weight" in names and "conv4.subm_b.norm.bias" in names
    assert sum(name.endswith("conv.weight") for name in names) == 12


def test_the_unets_of_spconv_and_torchsparse_have_one_layout(points, plain_settings):
    coords, x = points
    with doors.standin():
        import spconv.pytorch as sp

        one = copy.deepcopy(spconv.ResidualUNet(sp, classes=5, blocks=(1, 2, 1), **THIN))
        y = one(sp.SparseConvTensor(x, coords, [32, 32, 32], 2))
        assert torch.equal(y.indices, coords) and y.features.shape == (len(coords), 5)
        assert all(grad is not None for grad in gradients(one, y.features))
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"):
        import torchsparse as ts
        import torchsparse.nn

        blocks = (1, 2, 1, 2, 2, 2)
        other = copy.deepcopy(for_torchsparse.ResidualUNet(ts, classes=5, blocks=blocks, **THIN))
        z = other(ts.SparseTensor(x, coords))
        assert torch.equal(z.coords, coords) and z.feats.shape == (len(coords), 5)
        assert all(grad is not None for grad in gradients(other, z.feats))
    assert "encoder.2.blocks.1.norm2.weight" in one.state_dict()
    counts = [sum(p.numel() for p in net.parameters()) for net in (one, other)]
    assert counts[0] == counts[1]


def test_minkunet(plain_settings):
    coords = cloud((16, 16, 16), 2, 0.05)
    with sparse_bridge.enable("minkowski", mode="standin"):
        import MinkowskiEngine as ME

        network = copy.deepcopy(
            minkowski.MinkUNet(ME, 4, 5, layers=(1,) * 8, planes=(4, 4, 6, 8, 8, 6, 4, 4), init=4)
        )
        y = network(ME.SparseTensor(torch.randn(len(coords), 4), coords))
        assert y.F.shape == (len(coords), 5)
        assert all(grad is not None for grad in gradients(network, y.F))
    assert "block8.0.norm2.bn.weight" in network.state_dict()
