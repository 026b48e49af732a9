"""`core.functional` in a graph: with maps that the graph makes, and with maps from outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import sparse_bridge.compile
from sparse_bridge.core import functional as sparse
from sparse_bridge.errors import CoordinateError, ShapeError, UnsupportedError
from tests.compile.comparison import compare
from tests.compile.programs import GRID, scene
from tests.releases import WHOLE_GRAPHS

pytestmark = WHOLE_GRAPHS


class Network(nn.Module):
    """Every map and every product."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = {"same": (27, 4, 6), "down": (8, 6, 6), "up": (8, 6, 6), "wide": (27, 6, 4)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 8))
        self.bias, self.norm = nn.Parameter(torch.randn(6)), nn.BatchNorm1d(6)

    def forward(self, features, coords):
        offsets = sparse.kernel_offsets((3, 3, 3))
        halves = sparse.kernel_offsets((2, 2, 2), padding=0)
        voxels = sparse.coordinate_map(coords, GRID, batch_size=2)
        same = sparse.submanifold(voxels, offsets)
        x = self.norm(sparse.conv(features, self.same, self.bias, same)).relu()
        coarse, down = sparse.strided(voxels, halves, stride=2)
        y = sparse.conv(x, self.down, None, down) + sparse.pool(x, down, "max")
        fine, up = sparse.generative(coarse, halves, 2, GRID)
        z = sparse.conv(y, self.up, None, up)
        back = sparse.between(fine, voxels, offsets)
        x = x + sparse.conv(y, self.up, None, sparse.inverse(down))
        first = torch.arange(3, device=coords.device)
        pairs = sparse.kernel_map([(first, first)] * 8, coarse.n_rows, coarse.coords.shape[0])
        items = sparse.global_pool(sparse.conv(y, self.up, None, pairs), coarse.coords[:, 0], 2, "avg")
        return sparse.conv(z, self.wide, None, back) + x[:, :4] + items.sum()


def test_maps_of_a_graph(plain_settings):
    compare(Network().train(), "aot_eager", 3)


@pytest.mark.gpu
def test_maps_of_a_graph_on_a_gpu(plain_settings):
    compare(Network().train(), "inductor", 3, device="cuda")


def test_epilogues_in_a_graph(plain_settings):
    coords = scene(0)[1]
    torch.manual_seed(0)
    x, weight, rest = (torch.randn(len(coords), 4), torch.randn(27, 4, 5), torch.randn(len(coords), 5))

    def run(coords, activation, residual):
        kmap = sparse.submanifold(sparse.coordinate_map(coords, GRID, 2), sparse.kernel_offsets((3, 3, 3)))
        return sparse.conv(x, weight, None, kmap, activation=activation, alpha=0.1, residual=residual)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for activation in (None, "relu", "leaky_relu", "sigmoid"):
        for residual in (None, rest):
            given = coords, activation, residual
            with torch.no_grad():
                torch.testing.assert_close(compiled(*given), run(*given), rtol=1e-4, atol=1e-4)


def layers(kmap, weight):
    """A program over a map from outside."""

    def run(x):
        return sparse.conv(x.relu(), weight, None, kmap).square()

    return run


def outside_map():
    features, coords = scene(0)
    kmap = sparse.submanifold(sparse.coordinate_map(coords, GRID, 2), sparse.kernel_offsets((3, 3, 3)))
    return features, kmap, torch.randn(27, 4, 5)


def test_a_map_from_outside_is_one_break(plain_settings):
    features, kmap, weight = outside_map()
    run = layers(kmap, weight)
    torch._dynamo.reset()
    counters.clear()
    y = torch.compile(run, backend="aot_eager")(features)
    torch.testing.assert_close(y, run(features))
    assert counters["stats"]["unique_graphs"] == 2 and len(counters["graph_break"]) == 1
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(run, backend="aot_eager", fullgraph=True)(features)


def test_a_portable_map_needs_no_break(plain_settings):
    weight = torch.randn(27, 4, 5, requires_grad=True)

    def run(x, down):
        y = sparse.conv(x, weight[:8], None, down)
        return sparse.conv(y[:, :4].relu(), weight[:8], None, sparse.inverse(down))

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    graphs = []
    for number in range(4):
        features, coords = scene(number)
        voxels = sparse.coordinate_map(coords, GRID, 2)
        down = sparse.strided(voxels, sparse.kernel_offsets((2, 2, 2), padding=0), 2)[1]
        found = []
        for function, kmap in (
            (compiled, sparse_bridge.compile.portable(down)),
            (run, down),
            (run, sparse_bridge.compile.portable(down)),
        ):
            y = function(features, kmap)
            found.append((y, *torch.autograd.grad(y.square().sum(), weight)))
        for other in found[:2]:
            torch.testing.assert_close(other, found[2], rtol=1e-4, atol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], graphs
    with pytest.raises(UnsupportedError, match="expected a CoordinateMap"):
        sparse_bridge.compile.portable(weight)


def test_maps_that_leave_a_graph_are_read_like_others(plain_settings):
    features, _, weight = outside_map()

    def make(coords):
        voxels = sparse.coordinate_map(coords, GRID, 2)
        return voxels, sparse.submanifold(voxels, sparse.kernel_offsets((3, 3, 3)))

    coords = scene(0)[1]
    torch._dynamo.reset()
    voxels, kmap = torch.compile(make, backend="eager", fullgraph=True)(coords)
    y = sparse.conv(features, weight, None, kmap)
    assert torch.equal(y, sparse.conv(features, weight, None, make(coords)[1]))
    coarse, _ = sparse.strided(voxels, sparse.kernel_offsets((2, 2, 2), padding=0), 2)
    assert coarse.n_rows < voxels.n_rows == len(coords)
    assert sparse.pool(y, sparse.inverse(kmap), "sum").shape == y.shape


def test_errors_of_a_graph_are_those_of_the_functions(plain_settings):
    def run(x, coords):
        voxels = sparse.coordinate_map(coords, GRID, 1)
        kmap = sparse.submanifold(voxels, sparse.kernel_offsets((3, 3, 3)))
        return sparse.conv(x, torch.ones(27, 3, 2), None, kmap)

    features, coords = scene(0)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    with pytest.raises(CoordinateError, match="a batch index is 1"):
        compiled(features, coords)
    coords[:, 0] = 0
    with pytest.raises(ShapeError):
        compiled(features, coords.unique(dim=0)[: len(coords)])


def test_relations_are_one_break(plain_settings):
    torch.manual_seed(0)
    layer = sparse.RelationalConv(4, 5, 3)
    edges, kinds, x = torch.randint(9, (2, 30)), torch.randint(3, (30,)), torch.randn(9, 4)

    def run(x):
        return layer(x.relu(), edges, kinds).square()

    torch._dynamo.reset()
    counters.clear()
    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(x), run(x))
    assert counters["stats"]["unique_graphs"] == 2 and len(counters["graph_break"]) == 1
