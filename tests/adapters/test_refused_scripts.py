"""`torch.jit.script` of layers: one error that says what to do."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.errors import UnsupportedError


def spconv_layers():
    sp = importlib.import_module("spconv.pytorch")
    conv = sp.SubMConv3d(2, 2, 3)
    return [
        conv,
        sp.SparseConv3d(2, 2, 3, 2),
        sp.SparseMaxPool3d(2),
        sp.ToDense(),
        sp.SparseSequential(conv, nn.ReLU()),
    ]


def torchsparse_layers():
    spnn = importlib.import_module("torchsparse.nn")
    made = [spnn.Conv3d(2, 2, 3), spnn.BatchNorm(2), spnn.ReLU(), spnn.GlobalAvgPool()]
    return [*made, nn.Sequential(spnn.Conv3d(2, 2, 3), spnn.ReLU())]


def minkowski_layers():
    ME = importlib.import_module("MinkowskiEngine")
    return [
        ME.MinkowskiConvolution(2, 2, kernel_size=3, dimension=3),
        ME.MinkowskiBatchNorm(2),
        ME.MinkowskiReLU(),
        ME.MinkowskiMaxPooling(2, 2, dimension=3),
        ME.MinkowskiLinear(2, 2),
        ME.MinkowskiUnion(),
        ME.MinkowskiInstanceNorm(2),
        ME.MinkowskiGlobalPooling(),
    ]


def flex_gemm_layers():
    layers = importlib.import_module("flex_gemm.nn")
    return [layers.SubmanifoldConv3d(2, 2, 3), layers.SparsePool3d(2)]


LAYERS = {
    "spconv": spconv_layers,
    "torchsparse": torchsparse_layers,
    "minkowski": minkowski_layers,
    "flex_gemm": flex_gemm_layers,
}


class Network(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2), layer])

    def forward(self, x):
        return self.parts[1](x)


@pytest.mark.parametrize("name", LAYERS)
def test_a_script_is_refused(name, monkeypatch):
    for module in [one for one in sys.modules if one.partition(".")[0] in ("spconv", "cumm")]:
        monkeypatch.delitem(sys.modules, module)  # the real one
    profile = "2.0" if name == "flex_gemm" else None
    with sparse_bridge.enable(name, mode="standin", profile=profile):
        for layer in LAYERS[name]():
            for model in (layer, Network(layer)):
                with pytest.raises(UnsupportedError, match=r"script was given a .* Use torch\."):
                    torch.jit.script(model)
        assert torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
