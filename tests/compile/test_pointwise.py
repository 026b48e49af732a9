"""Layers of kernel volume 1 in graphs: products by kernels, as eager layers have them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core.compile import products
from sparse_bridge.core.ops import pointwise, trained_norms
from tests.clouds import cloud
from tests.releases import WHOLE_GRAPHS

pytestmark = [pytest.mark.emulated, WHOLE_GRAPHS]
GRID = (9, 8, 7)
WANTED = ["sparse_bridge.same_rows", "sparse_bridge.conv"] * 2


@pytest.fixture
def sp(kernel_lane, rules, monkeypatch):
    """spconv where kernels multiply, as on a GPU."""
    rules.set(pointwise, DEVICES=(torch.device(kernel_lane.device).type,))
    for owner, name in ((pointwise, "launched"), (products, "_launched")):
        monkeypatch.setattr(owner, name, lambda device, kind: True)
    torch._dynamo.reset()
    with sparse_bridge.enable("spconv", mode="standin"):
        import spconv.pytorch as spconv

        yield spconv


def network(sp, bias):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = sp.SubMConv3d(4, 16, 1, bias=bias)
            self.norm = nn.BatchNorm1d(16)
            self.head = sp.SubMConv3d(16, 5, 1, bias=True)

        def forward(self, features, coords):
            x = self.first(sp.SparseConvTensor(features, coords, GRID, 1))
            x = x.replace_feature(self.norm(x.features).relu())
            return self.head(x).features

    torch.manual_seed(0)
    return Network().half()


def scenes(device):
    for seed, share in enumerate((0.1, 0.3, 0.2)):
        coords = cloud(GRID, 1, share, seed=seed).to(device)
        yield torch.randn(len(coords), 4, device=device).half(), coords


def compiled(model, graphs):
    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    return torch.compile(model, fullgraph=True, backend=keep)


def called(graph):
    return [str(node.target) for node in graph.graph.nodes if "sparse_bridge" in str(node.target)]


@pytest.mark.parametrize("bias", [False, True])
def test_inference(sp, kernel_lane, bias):
    """Bit for bit what eager layers compute one by one; one more graph serves all numbers of
    rows."""
    model, graphs = network(sp, bias).eval().to(kernel_lane.device), []
    fast = compiled(model, graphs)
    with torch.no_grad():
        for features, coords in scenes(kernel_lane.device):
            y = fast(features, coords)
            with settings.override(optimize="off"):
                assert torch.equal(y, model(features, coords))
    assert len(graphs) == 2
    assert [name.removesuffix(".default") for name in called(graphs[1])] == WANTED


def test_training(sp, kernel_lane, monkeypatch):
    """By `aot_eager`: gradients of features, weights and biases, those of eager layers with torch's
    norms. (A bias before a norm has none but rounding.) A graph does not look at the GPU."""
    serves = trained_norms.serves

    def asked(x):
        assert not torch.compiler.is_compiling()
        return serves(x)

    monkeypatch.setattr(trained_norms, "serves", asked)
    model = network(sp, True).train().to(kernel_lane.device)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for features, coords in scenes(kernel_lane.device):
        found = []
        for one in (fast, model):
            x = features.clone().requires_grad_()
            with settings.override(optimize="fuse" if one is fast else "off"):
                y = one(x, coords)
            model.zero_grad()
            (y.float() ** 2).mean().backward()
            found.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
        for mine, eager in zip(*found, strict=True):
            scale = float(eager.abs().max()) + 1e-6
            torch.testing.assert_close(mine.float(), eager.float(), rtol=4e-3, atol=4e-3 * scale)


def test_fp32_is_the_kernels_too(sp, kernel_lane):
    """Libraries choose among kernels by the number of rows, and with them the bits."""
    model, graphs = network(sp, True).float().eval().to(kernel_lane.device), []
    features, coords = next(scenes(kernel_lane.device))
    with torch.no_grad():
        y = compiled(model, graphs)(features.float(), coords)
        assert torch.equal(y, model(features.float(), coords))
    (names,) = [called(graph) for graph in graphs]
    assert [name.removesuffix(".default") for name in names] == WANTED


def test_modules_with_a_dataflow_stay_torchs(sp, kernel_lane):
    model, graphs = network(sp, True).eval().to(kernel_lane.device), []
    sparse_bridge.dataflow(model, "masked")
    with torch.no_grad():
        compiled(model, graphs)(*next(scenes(kernel_lane.device)))
    assert [called(graph) for graph in graphs] == [[]]
