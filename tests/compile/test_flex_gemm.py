"""FlexGEMM's functions in compiled programs: operators of one graph, or one break."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import sparse_bridge
from sparse_bridge.adapters.flex_gemm.errors import ArgumentShapeError
from tests.adapters.flex_gemm import installed
from tests.adapters.flex_gemm.test_convolutions import voxels, weights
from tests.compile.comparison import assert_same
from tests.compile.programs import WHERE, forget_modules
from tests.releases import WHOLE_GRAPHS

F32 = torch.float32


@pytest.fixture
def flex_gemm():
    sparse_bridge.disable()
    torch.manual_seed(0)
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        import flex_gemm

        counters.clear()
        torch._dynamo.reset()
        yield flex_gemm
    forget_modules()


class Network(nn.Module):
    """As TRELLIS.2 calls it: setters before every layer, a cache that travels with the voxels."""

    def __init__(self, flex_gemm, out_coords=None):
        super().__init__()
        ops = flex_gemm.ops
        self._set_algorithm, self._out_coords = ops.spconv.set_algorithm, out_coords
        self._submanifold = ops.spconv.sparse_submanifold_conv3d
        self._strided, self._sample = ops.spconv.sparse_conv3d, ops.grid_sample.grid_sample_3d
        self._encode, self._decode = ops.serialize.encode_seq, ops.serialize.decode_seq
        self.first = nn.Parameter(weights(4, 8, (3, 3, 3), F32))
        self.second = nn.Parameter(weights(8, 8, (3, 3, 3), F32))
        self.down = nn.Parameter(weights(8, 6, (2, 2, 2), F32))
        self.bias = nn.Parameter(torch.rand(8))

    def layer(self, feats, coords, shape, weight, bias, caches):
        self._set_algorithm("implicit_gemm")
        known = caches.get("conv")
        y, cache = self._submanifold(feats, coords, shape, weight, bias, known, (1, 1, 1))
        assert known is None or cache is known
        caches["conv"] = cache
        return nn.functional.silu(y)

    def forward(self, feats, coords, shape, grid, caches):
        y = self.layer(feats, coords, shape, self.first, self.bias, caches)
        y = self.layer(y, coords, shape, self.second, None, caches)
        wide = torch.Size((shape[0], 8, *shape[2:]))
        sampled = self._sample(y, coords, wide, grid)
        z, places, _ = self._strided(y, coords, shape, self.down, None, None, self._out_coords, (2, 2, 2))
        codes = self._encode(coords, shape, "hilbert")
        back = self._decode(codes, shape, "hilbert")
        return z, places, sampled, codes, back


def scenes(count, dtype=F32):
    for n in range(count):
        feats, coords, shape = voxels(60 + 15 * n, 4, dtype=dtype, seed=n)
        yield feats, coords, shape, torch.rand(2, 9, 3) * 5


def compared(network, compiled, scene, caches=None):
    """The caches that the compiled program left, once it agrees with the eager one."""
    twin, given = copy.deepcopy(network), dict(caches or {})
    for run, seen in ((compiled, given), (twin, dict(caches or {}))):
        leaf = scene[0].clone().requires_grad_()
        outputs = run(leaf, *scene[1:], seen)
        outputs[0].square().mean().add(outputs[2].sum()).backward()
        if run is compiled:
            mine = [*outputs, leaf.grad, *(p.grad for p in network.parameters())]
    theirs = [*outputs, leaf.grad, *(p.grad for p in twin.parameters())]
    for pair in zip(mine, theirs, strict=True):
        assert_same(*pair)
    network.zero_grad()
    return given


@WHOLE_GRAPHS
def test_one_graph_for_any_rows(flex_gemm):
    network = Network(flex_gemm)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    for scene in scenes(3):
        caches = compared(network, compiled, scene)
    assert counters["stats"]["unique_graphs"] <= 2
    # What a graph left serves eager layers, and holds what a cache holds.
    feats, coords, shape, _ = scene
    cache = caches["conv"]
    function = flex_gemm.ops.spconv.sparse_submanifold_conv3d
    want, made = function(feats, coords, shape, network.first)
    out, same = function(feats, coords, shape, network.first, None, cache)
    assert same is cache and torch.equal(out, want)
    assert torch.equal(cache["neighbor_map"], made["neighbor_map"])
    assert torch.equal(cache.sorted_idx, made.sorted_idx) and not hasattr(cache, "nothing")


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("training", (False, True), ids=("eval", "train"))
@pytest.mark.parametrize("device", WHERE)
def test_ten_scenes(flex_gemm, device, training, backend):
    network = Network(flex_gemm).to(device)
    compiled = torch.compile(network, backend=backend, fullgraph=True)
    graphs = []
    for feats, coords, shape, grid in scenes(10):
        given = feats.to(device), coords.to(device), shape, grid.to(device)
        if training:
            compared(network, compiled, given)
        else:
            with torch.no_grad():
                for pair in zip(compiled(*given, {}), network(*given, {}), strict=True):
                    assert_same(*pair)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], graphs


@WHOLE_GRAPHS
def test_a_cache_of_one_graph_in_another(flex_gemm):
    network = Network(flex_gemm)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    scene = next(scenes(1))
    caches = compared(network, compiled, scene)
    assert compared(network, compiled, scene, caches)["conv"] is caches["conv"]


@pytest.mark.slow
def test_what_comes_from_outside_runs_between_graphs(flex_gemm, monkeypatch):
    """Caches of eager layers, given output coordinates, parts that somebody replaced."""
    feats, coords, shape, _ = next(scenes(1))
    weight, spconv = weights(4, 8, (3, 3, 3), F32).requires_grad_(), flex_gemm.ops.spconv
    _, cache = spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)

    def cached(feats):
        y, same = spconv.sparse_submanifold_conv3d(2 * feats, coords, shape, weight, None, cache)
        assert same is cache
        return y

    def onto(feats):
        return spconv.sparse_conv3d(2 * feats, coords, shape, weight, None, None, coords[:7])[0]

    def alone(feats):
        return spconv.sparse_submanifold_conv3d(2 * feats, coords, shape, weight)[0]

    for program in (cached, onto):
        found = torch.compile(program, backend="eager")(feats)
        torch.testing.assert_close(found, program(feats))
    calls, parts = [], spconv.SubMConv3dFunction
    backward = parts.backward
    monkeypatch.setattr(parts, "backward", staticmethod(lambda *given: calls.append(1) or backward(*given)))
    torch.compile(alone, backend="eager")(feats).sum().backward()
    assert calls == [1] and sum(counters["graph_break"].values()) > 0


@WHOLE_GRAPHS
def test_autocast_changes_nothing(flex_gemm):
    feats, coords, shape, _ = next(scenes(1))
    weight = weights(4, 8, (3, 3, 3), F32)

    def program(feats):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
            half, _ = flex_gemm.ops.spconv.sparse_submanifold_conv3d(
                nn.functional.linear(feats, torch.eye(4)), coords, shape, weight
            )
        return y, half

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    found, want = compiled(feats), program(feats)
    assert [y.dtype for y in found] == [F32, torch.bfloat16]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True))


def test_errors_are_those_of_eager_layers(flex_gemm):
    feats, coords, shape, _ = next(scenes(1))
    function = flex_gemm.ops.spconv.sparse_submanifold_conv3d
    compiled = torch.compile(lambda x, w: function(x, coords, shape, w)[0], backend="eager")
    with pytest.raises(ArgumentShapeError, match="5 input channels"):
        compiled(feats, weights(5, 8, (3, 3, 3), F32))
    with pytest.raises(ArgumentShapeError, match="9 rows"):
        compiled(feats[:9], weights(4, 8, (3, 3, 3), F32))


@WHOLE_GRAPHS
def test_exported_programs(flex_gemm):
    feats, coords, shape, grid = next(scenes(1))
    network = Network(flex_gemm).eval()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, feats, coords, grid):
            return self.network(feats, coords, shape, grid, {})

    rows = torch.export.Dim("rows", min=2)
    with torch.no_grad():
        program = torch.export.export(
            Plain(), (feats, coords, grid), dynamic_shapes={"feats": {0: rows}, "coords": {0: rows}, "grid": None}
        )
        other = voxels(33, 4, dtype=F32, seed=9)
        want = network(*other[:2], shape, grid, {})
        torch.testing.assert_close(program.module()(*other[:2], grid), want)
    import sparse_bridge.compile

    assert {"sparse_bridge::map", "sparse_bridge::flex_gemm_grid_sample"} <= set(sparse_bridge.compile.needed(program))


@pytest.mark.slow
@WHOLE_GRAPHS
def test_functions_of_an_installed_build(monkeypatch):
    feats, coords, shape, grid = next(scenes(1))
    weight = weights(4, 4, (3, 3, 3), F32).requires_grad_()
    real = installed.first(monkeypatch)
    early = real.ops.spconv.sparse_submanifold_conv3d

    def looked_up(feats):
        y, _ = real.ops.spconv.sparse_submanifold_conv3d(feats, coords, shape, weight)
        return y + real.ops.grid_sample.grid_sample_3d(y, coords, shape, grid).sum()

    def by_name(feats):
        y, cache = early(feats, coords, shape, weight)
        y, _ = early(y, coords, shape, weight, None, cache)
        return y + real.ops.grid_sample.GridSample3dFunction.apply(y, coords, shape, grid).sum()

    with sparse_bridge.enable("flex_gemm", mode="patch"):
        for program, whole in ((looked_up, True), (by_name, False)):
            torch._dynamo.reset()
            compiled = torch.compile(program, backend="aot_eager", fullgraph=whole)
            gradients = []
            for run in (compiled, program):
                gradients.append(torch.autograd.grad(run(feats).square().mean(), weight)[0])
            torch.testing.assert_close(compiled(feats), program(feats))
            torch.testing.assert_close(*gradients)
    forget_modules()


def test_layers_of_the_second_generation_are_one_break_each(flex_gemm):
    sparse_bridge.disable()
    feats, coords, shape, _ = next(scenes(1))
    last = (shape[0], *shape[2:], shape[1])
    with sparse_bridge.enable("flex_gemm", mode="standin", profile="2.0"):
        import flex_gemm.nn as layers

        first, pool = layers.SubmanifoldConv3d(4, 8, 3), layers.SparsePool3d(2)

        def program(feats):
            y, _ = first(feats * 2, coords, last)
            z, places, _, _ = pool(y.relu(), coords, last)
            return z + 1, places

        counters.clear()
        compiled = torch.compile(program, backend="eager")
        for mine, theirs in zip(compiled(feats), program(feats), strict=True):
            assert torch.equal(mine, theirs)
    assert counters["stats"]["unique_graphs"] == 3, dict(counters["stats"])
    forget_modules()
