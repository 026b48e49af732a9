"""Where graphs may break, layers run between them, and nothing of the engine is traced."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.compile.programs import GRID, PROGRAMS, scene
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS


def minkowski_layers():
    """Programs with layers, or a field, between graphs."""
    import MinkowskiEngine as ME

    conv = ME.MinkowskiConvolution(4, 6, kernel_size=3, dimension=3)
    norm = ME.MinkowskiInstanceNorm(6)
    whole = torch.Size([2, 6, *GRID])

    def tensor(features, coords):
        return conv(ME.SparseTensor(features.relu(), coords))

    def field(features, coords):
        return ME.TensorField(features.relu(), coords.float() + 0.25)

    def back(features, coords):
        points = field(features, coords)
        return conv(points.sparse()).slice(points).F.square()

    return {
        "dense": lambda f, c: tensor(f, c).dense(whole)[0].square(),
        "coo": lambda f, c: tensor(f, c).sparse()[0].to_dense().square(),
        "instance norm": lambda f, c: norm(tensor(f, c)).F.square(),
        "interpolation": lambda f, c: tensor(f, c).features_at_coordinates(c.float() + 0.25).square(),
        "field": back,
        "splat": lambda f, c: conv(field(f, c).splat()).F.square(),
    }


def torchsparse_layers():
    import torchsparse as ts
    import torchsparse.nn as spnn
    from torchsparse.nn.modules import bev

    conv = spnn.Conv3d(4, 6, 3)
    plane, tower = bev.ToDenseBEVConvolution(6, 5, GRID), bev.ToBEVHeightCompression(6, GRID)

    def tensor(features, coords):
        return conv(ts.SparseTensor(features.relu(), coords, spatial_range=(2, *GRID)))

    return {
        "dense": lambda f, c: tensor(f, c).dense().square(),
        "plane": lambda f, c: plane(tensor(f, c)).square(),
        "tower": lambda f, c: tower(tensor(f, c)).square(),
    }


LAYERS = {"minkowski": minkowski_layers, "torchsparse": torchsparse_layers}
CASES = [
    *(("minkowski", name) for name in ("dense", "coo", "instance norm", "interpolation", "field", "splat")),
    *(("torchsparse", name) for name in ("dense", "plane", "tower")),
]
COMMON = [("minkowski", "dense"), ("torchsparse", "plane")]


@pytest.mark.sample(2)
@WHOLE_GRAPHS
@pytest.mark.parametrize("case", quick(COMMON, CASES), ids="-".join)
def test_a_layer_between_two_graphs(case, plain_settings):
    api, name = case
    with PROGRAMS[api]():
        run = LAYERS[api]()[name]
        torch._dynamo.reset()
        counters.clear()
        graphs, counts = [], []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(run, backend=backend)
        for number in range(4):
            torch.testing.assert_close(compiled(*scene(number)), run(*scene(number)), rtol=1e-4, atol=1e-4)
            counts.append(len(graphs))
        assert counts[-1] == counts[1], counts
        called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
        assert "relu" in called and not any("sparse_bridge" in name for name in called)
        assert any("sparse layers run between graphs" in why for why in counters["graph_break"])
