"""The networks that everything takes from one place: layouts, names, and what they may know."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch

import sparse_bridge
import sparse_bridge.tools.networks
from sparse_bridge import settings
from sparse_bridge.tools.networks import minkowski, spconv
from sparse_bridge.tools.networks import torchsparse as for_torchsparse
from tests.adapters.spconv import apis
from tests.api.test_imports import imports_of
from tests.checks import assert_close
from tests.clouds import cloud

FOLDER = pathlib.Path(sparse_bridge.tools.networks.__file__).parent
THIN = {"encoder": (4, 6, 8), "decoder": (8, 6, 4), "stem": 4}


@pytest.fixture(scope="module")
def points():
    coords = cloud((32, 32, 32), 2, 0.01)
    return coords, torch.randn(len(coords), 4)


def test_networks_know_nothing_of_the_bridge_and_import_no_framework():
    files = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
    assert [path.stem for path in files] == ["codec", "minkowski", "spconv", "torchsparse"]
    for path in files:
        tops = {name.partition(".")[0] for name in imports_of(path, True)}
        assert tops <= {"__future__", "collections", "itertools", "torch", "typing"}, path


def gradients(network, y):
    y.square().mean().backward()
    return [p.grad for p in network.parameters()]


def test_second(points, plain_settings):
    coords, x = points
    with apis.standin():
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
    with apis.standin():
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

        network = copy.deepcopy(minkowski.MinkUNet(ME, 4, 5, layers=(1,) * 8, planes=(4, 4, 6, 8, 8, 6, 4, 4), init=4))
        y = network(ME.SparseTensor(torch.randn(len(coords), 4), coords))
        assert y.F.shape == (len(coords), 5)
        assert all(grad is not None for grad in gradients(network, y.F))
    assert "block8.0.norm2.bn.weight" in network.state_dict()


@pytest.fixture
def ts(plain_settings):
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.1"):
        import torchsparse.backbones
        import torchsparse.nn

        yield torchsparse


# Of the published backbones; of the third one, its layers counted by hand: five 5x5x5 layers in
# each of four stages, a layer of three offsets, and a norm's two vectors behind each of them.
PARAMETERS = {
    "resnet21d": 2_693_920,
    "unet42": 21_721_472,
    "resnet_large": sum(125 * (c_in * c + 4 * c * c) + 10 * c for c_in, c in [(4, 16), (16, 32), (32, 64), (64, 128)])
    + 3 * 128 * 128
    + 2 * 128,
}


@pytest.mark.parametrize("name", for_torchsparse.BACKBONES)
def test_backbones_have_the_parameters_of_their_layers(ts, name):
    network = for_torchsparse.Backbone(ts, name)
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS[name]
    kernels = {p.shape[0] for p in network.parameters() if p.dim() == 3}
    assert (125 in kernels, 27 in kernels) == (name == "resnet_large", name != "resnet_large")


@pytest.mark.parametrize("name", for_torchsparse.BACKBONES)
def test_backbones_compute_what_products_written_out_do(ts, points, name):
    coords, x = points
    network = copy.deepcopy(for_torchsparse.Backbone(ts, name, width=0.25)).double()

    def run():
        network.zero_grad()
        y = network(ts.SparseTensor(x.double(), coords))
        return [y.feats, *gradients(network, y.feats)], y.coords

    found, places = run()
    with settings.override(dataflow="explicit"):
        expected, others = run()
    assert torch.equal(places, others)
    assert torch.equal(places, coords) if name == "unet42" else len(places) < len(coords)
    assert all(one is not None for one in found)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, torch.float64)
