"""What is no operator is one break of the graph, and nothing of the engine is traced."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from sparse_bridge.core.traced import graphs
from tests.compile.programs import GRID, PROGRAMS, scene
from tests.quick import quick
from tests.releases import WHOLE_GRAPHS


def minkowski_layers():
    """Programs with one layer, or a field, between two graphs, and how often those break."""
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
        "dense": (lambda f, c: tensor(f, c).dense(whole)[0].square(), 1),
        "coo": (lambda f, c: tensor(f, c).sparse()[0].to_dense().square(), 1),
        "instance norm": (lambda f, c: norm(tensor(f, c)).F.square(), 1),
        "interpolation": (lambda f, c: tensor(f, c).features_at_coordinates(c.float() + 0.25).square(), 1),
        "field": (back, 3),
        "splat": (lambda f, c: conv(field(f, c).splat()).F.square(), 2),
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
        "dense": (lambda f, c: tensor(f, c).dense().square(), 1),
        "plane": (lambda f, c: plane(tensor(f, c)).square(), 1),
        "tower": (lambda f, c: tower(tensor(f, c)).square(), 1),
    }


LAYERS = {"minkowski": minkowski_layers, "torchsparse": torchsparse_layers}
CASES = [
    *(("minkowski", name) for name in ("dense", "coo", "instance norm", "interpolation", "field", "splat")),
    *(("torchsparse", name) for name in ("dense", "plane", "tower")),
]
COMMON = [("minkowski", "dense"), ("torchsparse", "plane")]


@pytest.fixture
def breaks(monkeypatch):
    """What ran between two graphs."""
    seen, run = [], graphs.between_graphs

    @torch.compiler.disable
    def counted(dataflow, function, args, more):
        seen.append(function.__qualname__)
        return run(dataflow, function, args, more)

    monkeypatch.setattr(graphs, "between_graphs", counted)
    return seen


@pytest.mark.sample(2)
@WHOLE_GRAPHS
@pytest.mark.parametrize("case", quick(COMMON, CASES), ids="-".join)
def test_a_layer_between_two_graphs(case, breaks, plain_settings):
    door, name = case
    with PROGRAMS[door]():
        run, expected = LAYERS[door]()[name]
        torch._dynamo.reset()
        counters.clear()
        compiled, made = torch.compile(run, backend="aot_eager"), []
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            for number in range(4):
                breaks.clear()
                y, ran = compiled(*scene(number)), len(breaks)
                assert ran == expected, breaks
                torch.testing.assert_close(y, run(*scene(number)), rtol=1e-4, atol=1e-4)
                made.append(counters["stats"]["unique_graphs"])
        assert made[-1] == made[1], made
        assert all("torch.compiler.disable" in why for why in counters["graph_break"])


@pytest.mark.slow
@WHOLE_GRAPHS
@pytest.mark.parametrize("door", quick(["torchsparse"], ["spconv", "torchsparse", "torchsparse 1.4", "minkowski"]))
def test_networks_in_many_graphs(door, plain_settings):
    """Where torch gives a layer up after so many graphs, it runs as ever, on maps of both kinds."""
    plain = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False)
    with PROGRAMS[door]() as programs, torch.no_grad(), plain:
        program = programs["unet"]().eval()
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="eager")
        for number in range(3):
            torch.testing.assert_close(compiled(*scene(number)), program(*scene(number)), rtol=1e-4, atol=1e-4)
