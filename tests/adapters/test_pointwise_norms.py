"""Layers of kernel volume 1 and the norms behind them are one launch in inference, in every
framework."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import hooks, settings
from sparse_bridge.core.ops import pointwise
from tests.adapters.spconv import apis
from tests.clouds import cloud, features
from tests.rules import layers_deferred

pytestmark = pytest.mark.emulated

SHAPE = (12, 10, 14)


@contextlib.contextmanager
def spconv():
    with apis.standin() as sp:
        first = sp.SubMConv3d(4, 16, 3, bias=False, indice_key="a")
        block = sp.SparseSequential(sp.SubMConv3d(16, 24, 1), nn.BatchNorm1d(24))

        def run(x, coords):
            return block(first(sp.SparseConvTensor(x, coords, list(SHAPE), 2))).features

        yield nn.ModuleList([first, block]), run


@contextlib.contextmanager
def torchsparse():
    with sparse_bridge.enable("torchsparse", mode="standin"):
        ts, tnn = importlib.import_module("torchsparse"), importlib.import_module("torchsparse.nn")
        layers = tnn.Conv3d(4, 16, 3), tnn.Conv3d(16, 24, 1, bias=True), tnn.BatchNorm(24)

        def run(x, coords):
            out = ts.SparseTensor(x, coords)
            for layer in layers:
                out = layer(out)
            return out.feats

        yield nn.ModuleList(layers), run


@contextlib.contextmanager
def minkowski():
    with sparse_bridge.enable("minkowski", mode="standin"):
        me = importlib.import_module("MinkowskiEngine")
        layers = (
            me.MinkowskiConvolution(4, 16, kernel_size=3, dimension=3),
            me.MinkowskiConvolution(16, 24, kernel_size=1, bias=True, dimension=3),
            me.MinkowskiBatchNorm(24),
        )

        def run(x, coords):
            out = me.SparseTensor(x, coordinates=coords)
            for layer in layers:
                out = layer(out)
            return out.F

        yield nn.ModuleList(layers), run


@pytest.fixture
def norms(calls_of, monkeypatch):
    """How often torch normalises."""
    calls = calls_of(torch, "batch_norm")
    monkeypatch.setattr(hooks, "TORCHS_BATCH_NORM", torch.batch_norm)  # or nothing would be fused
    return calls


@pytest.fixture
def kernels(rules, monkeypatch, kernel_lane):
    """Kernels multiply halves here, as `auto` does on a GPU; layers of all sizes wait."""
    device = torch.device(kernel_lane.device)
    rules.set(pointwise, DEVICES=(device.type,))
    monkeypatch.setattr(pointwise, "launched", lambda device, kind: kind == torch.float16)
    rules.hold(layers_deferred())
    return device


@pytest.mark.parametrize("api", [spconv, torchsparse, minkowski])
def test_one_launch(api, kernels, norms):
    torch.manual_seed(0)
    with api() as (net, run):
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        net.to(kernels).half().eval()
        coords = cloud(SHAPE, share=0.2, seed=1).to(kernels)
        x = features(len(coords), 4, seed=1).to(kernels).half()
        with torch.no_grad():
            with settings.override(optimize="off"):
                want = run(x, coords)
            assert norms
            for _ in range(3):
                norms.clear()
                got = run(x, coords)
                torch.testing.assert_close(got.float(), want.float(), rtol=1e-2, atol=1e-2)
            assert not norms and type(got) is torch.Tensor
            got = run(x, coords)
            torch.testing.assert_close(got.float(), want.float(), rtol=1e-2, atol=1e-2)


def test_what_is_read_is_the_product(kernels):
    """The features between a layer and its norm are there for whoever looks at them."""
    with spconv() as (net, _), torch.no_grad():
        sp = importlib.import_module("spconv.pytorch")
        net.to(kernels).half().eval()
        coords = cloud(SHAPE, share=0.2, seed=2).to(kernels)
        x = features(len(coords), 16, seed=2).to(kernels).half()
        layer, norm = net[1][0], net[1][1]
        want = x.float() @ layer.weight.reshape(16, 24).float() + layer.bias.float()
        for _ in range(4):  # followed by the norm
            net[1](sp.SparseConvTensor(x, coords, list(SHAPE), 2))
        y = layer(sp.SparseConvTensor(x, coords, list(SHAPE), 2)).features
        normed = norm(y)
        torch.testing.assert_close(y.float(), want, rtol=1e-2, atol=1e-2)
        expected = norm.float()(want)
        torch.testing.assert_close(normed.float(), expected, rtol=2e-2, atol=2e-2)
