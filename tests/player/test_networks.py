"""Networks of four frameworks, packaged, played by the C code and executed on the emulator, against Python's layers."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge import tolerances
from sparse_bridge.core.device import selection
from sparse_bridge.export import export_gpu_package, package_scenes
from sparse_bridge.export.player import dependencies
from sparse_bridge.export.player.entry import flattened
from sparse_bridge.export.player.library import PlayerError
from tests.adapters.spconv import apis
from tests.quick import quick

from . import networks, zoo
from .played import ARCH, ROWS, Example, Played, expected, packaged

MemoryFault = pytest.importorskip("amd_emulator").MemoryFault
pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def inputs_of(network, rows, seed, dtype=torch.float32):
    return networks.scene(network.grid, rows, seed, dtype=dtype)


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_results_are_those_of_the_layers(gpu, tmp_path, name):
    """In every bit where no layer of torch takes part, for any number of rows, whatever memory held before."""
    path = tmp_path / "model.sbp"
    with zoo.network(name) as own:
        played = Played(gpu, path, packaged(path, own.model, own.inputs(*inputs_of(own, 250, 1))), graph=True)
        for seed, rows in enumerate((250, 37, ROWS)):
            features, coords = inputs_of(own, rows, seed)
            if own.inputs(features, coords) != (features, coords) and seed:
                coords[:, 1:] = 3 * coords[:, 1:] - 20 * seed  # other bounds than the example's
            wanted = expected(own.model, *own.inputs(features, coords))
            played.poison()
            for mine, theirs in zip(played(features, coords), wanted, strict=True):
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
                if own.exact or not mine.is_floating_point():
                    assert torch.equal(mine, theirs), (seed, (mine - theirs).abs().max())
                else:
                    assert (mine - theirs).norm() / theirs.norm() < tolerances.of("network", mine.dtype).rms
        assert played.unchanged()
        played.close()


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_example_plays_what_torch_computed(gpu, tmp_path, capfd, name):
    """Scenes that were recorded on the host: rows in the same order, values within the tolerance."""
    with zoo.network(name) as own:
        scenes = [own.inputs(*inputs_of(own, rows, rows)) for rows in (250, 90)]
        folder = tmp_path / "package"
        export_gpu_package(own.model, scenes[0], folder, targets=[f"hip:{ARCH}"], rows=ROWS, scenes=scenes[1:])
        assert Example(gpu, folder, tmp_path)() == 0, capfd.readouterr()
    assert capfd.readouterr().out.count(": ok") == 2


@pytest.fixture
def accesses(monkeypatch):
    """Of the steps of the program that was recorded last."""
    found = []

    def edges(steps):
        found[:] = steps
        return dependencies.edges(steps)

    monkeypatch.setattr("sparse_bridge.export.player.record.edges", edges)
    return found


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("name", quick(("SECOND", "MinkUNet"), zoo.NAMES))
def test_launches_reach_what_the_graph_knows_of(gpu, tmp_path, accesses, name):
    """Else steps could run beside each other of which one writes what the other needs."""
    path = tmp_path / "model.sbp"
    with zoo.network(name) as own:
        program = packaged(path, own.model, own.inputs(*inputs_of(own, 250, 1)))
        played = Played(gpu, path, program, graph=True, accesses=accesses)
        played.poison()
        features, coords = inputs_of(own, 37, 2)
        assert played(features, coords)
        assert played.unchanged()
        played.close()


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("lost", ["read", "written"])
def test_launches_that_reach_more_are_found(gpu, tmp_path, accesses, lost):
    path = tmp_path / "model.sbp"
    with apis.standin() as sp:
        model, grid = networks.encoder(sp)
        program = packaged(path, networks.ready(model), networks.scene(grid, 250, 1))
        *known, last = accesses
        last = [
            own._replace(writes=False) if lost == "written" else own for own in last if own.writes or lost != "read"
        ]
        played = Played(gpu, path, program, accesses=[*known, last])
        with pytest.raises((AssertionError, MemoryFault)):
            played(*networks.scene(grid, 37, 2))
        played.gpu.error = None
        played.close()


class Pooled(nn.Module):
    """A vector for every batch item."""

    def __init__(self, layers, pool, wrap):
        super().__init__()
        self.layers, self.pool, self.wrap = layers, pool, wrap

    def forward(self, *inputs):
        return self.pool(self.layers(self.wrap(*inputs)))


@contextlib.contextmanager
def pooled(name):
    """(model, what it takes of features and coordinates)."""
    framework, _, pool = name.partition(" ")
    with contextlib.ExitStack() as stack:
        if framework == "spconv":
            sp = stack.enter_context(apis.standin())
            layers = sp.SparseSequential(sp.SubMConv3d(4, 20, 3), nn.ReLU(), sp.SparseConv3d(20, 24, 3, 2, padding=1))
            pools = {"max": sp.SparseGlobalMaxPool, "avg": sp.SparseGlobalAvgPool}
            model = Pooled(layers, pools[pool](), lambda f, c: sp.SparseConvTensor(f, c, [16, 16, 32], 2))
            wrap = lambda f, c: (f, c)  # noqa: E731
        elif framework == "torchsparse":
            stack.enter_context(sparse_bridge.enable("torchsparse", mode="standin"))
            import torchsparse as ts

            layers = nn.Sequential(ts.nn.Conv3d(4, 20, 3), ts.nn.ReLU(True), ts.nn.Conv3d(20, 24, 2, stride=2))
            pools = {"max": ts.nn.GlobalMaxPool, "avg": ts.nn.GlobalAvgPool}
            model, wrap = Pooled(layers, pools[pool](), lambda x: x), lambda f, c: (ts.SparseTensor(f, c),)
        else:
            stack.enter_context(sparse_bridge.enable("minkowski", mode="standin"))
            import MinkowskiEngine as ME

            conv = ME.MinkowskiConvolution
            layers = nn.Sequential(conv(4, 20, 3, dimension=3), ME.MinkowskiReLU(), conv(20, 24, 2, 2, dimension=3))
            kinds = {"max": "Max", "avg": "Avg", "sum": "Sum"}
            last = nn.Sequential(getattr(ME, f"MinkowskiGlobal{kinds[pool]}Pooling")(), ME.MinkowskiLinear(24, 5))
            model, wrap = Pooled(layers, last, lambda x: x), lambda f, c: (ME.SparseTensor(f, c),)
        yield networks.ready(model), wrap


POOLS = [*(f"{framework} {pool}" for framework in ("spconv", "torchsparse") for pool in ("max", "avg"))]
POOLS += [f"MinkowskiEngine {pool}" for pool in ("max", "avg", "sum")]


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("name", POOLS)
def test_global_pools(gpu, tmp_path, name):
    """Maxima in every bit; sums are added in another order than by Python's layers."""
    path = tmp_path / "model.sbp"
    with pooled(name) as (model, inputs):
        grid = (16, 16, 32)
        played = Played(gpu, path, packaged(path, model, inputs(*networks.scene(grid, 250, 1))))
        for seed, rows in ((2, 250), (3, 40), (4, ROWS)):
            features, coords = networks.scene(grid, rows, seed)
            wanted = expected(model, *inputs(features, coords))
            played.poison()
            for mine, theirs in zip(played(features, coords), wanted, strict=True):
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
                if name == "spconv max" or not mine.is_floating_point():
                    assert torch.equal(mine, theirs)
                else:
                    assert (mine - theirs).norm() / theirs.norm() < tolerances.of("network", mine.dtype).rms
        assert played.unchanged()
        played.close()


def _minkowski(*layers):
    """MinkowskiEngine's layers by name and arguments, behind a convolution."""

    def make():
        import MinkowskiEngine as ME

        first = ME.MinkowskiConvolution(4, 8, 3, dimension=3)
        made = [getattr(ME, f"Minkowski{name}")(*given, dimension=3) for name, *given in layers]
        return nn.Sequential(first, *made), lambda f, c: (ME.SparseTensor(f, c),)

    return "minkowski", make


def _torchsparse():
    import torchsparse as ts

    layers = [ts.nn.Conv3d(4, 8, 3, stride=2), ts.nn.BatchNorm(8), ts.nn.LeakyReLU(0.1), ts.nn.Conv3d(8, 8, 3)]
    return nn.Sequential(*layers), lambda f, c: (ts.SparseTensor(f, c),)


def _spconv():
    import spconv.pytorch as sp

    layers = sp.SparseSequential(sp.SubMConv3d(4, 8, 3), sp.SparseConv3d(8, 8, 3, 2))
    return layers, lambda f, c: (sp.SparseConvTensor(f, c, [16, 16, 32], 2),)


POOLS_OF_CELLS = {f"{name} {size}": (f"{name}Pooling", size, 2) for name in ("Max", "Avg", "Sum") for size in (2, 3)}
LAYERS = {name: _minkowski(layer) for name, layer in POOLS_OF_CELLS.items()} | {
    "transposed": _minkowski(("Convolution", 8, 8, 2, 2), ("ConvolutionTranspose", 8, 8, 2, 2)),
    "generative": _minkowski(("Convolution", 8, 8, 2, 2), ("GenerativeConvolutionTranspose", 8, 8, 2, 2)),
    "torchsparse": ("torchsparse", _torchsparse),
    "spconv": ("spconv", _spconv),
}


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_over_a_sparse_tensor(gpu, tmp_path, name):
    """The bits of the same launches from Python, and what torch computes on the host."""
    (framework, make), grid, path = LAYERS[name], (16, 16, 32), tmp_path / "model.sbp"
    with sparse_bridge.enable(framework, mode="standin"):
        model, inputs = make()
        played = Played(gpu, path, packaged(path, networks.ready(model), inputs(*networks.scene(grid, 250, 1))))
        features, coords = networks.scene(grid, 60, 2)
        wanted = expected(model, *inputs(features, coords))
        with selection.standing_in("torch"), torch.no_grad():
            on_host = package_scenes.tensors_of(flattened(model(*inputs(features, coords))))
        played.poison()
        for mine, theirs, its in zip(played(features, coords), wanted, on_host, strict=True):
            assert torch.equal(mine, theirs) and mine.shape == its.shape
            limit = tolerances.of("network", "tf32" if framework == "torchsparse" else "fp32")
            assert (mine.double() - its).norm() <= limit.rms * its.double().norm()
        played.close()


class Levels(nn.Module):
    """FlexGEMM's strided convolutions, with submanifold ones between them; what came before is added further down."""

    def __init__(self, grid, n_items):
        super().__init__()
        self.grid, self.n_items = grid, n_items
        shapes = [(8, 3, 4), (16, 2, 8), (16, 3, 16), (16, 3, 16), (8, 3, 16)]
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(o, k, k, k, i)) for o, k, i in shapes])

    def forward(self, features, coords):
        from flex_gemm.ops.spconv import sparse_conv3d, sparse_submanifold_conv3d

        a, b, c, d, e = self.weights
        shape = torch.Size([self.n_items, 4, *self.grid])
        x, _ = sparse_submanifold_conv3d(features, coords, shape, a)
        x, coords, _ = sparse_conv3d(x.relu(), coords, shape, b, stride=2)
        shape = torch.Size([self.n_items, 16, *(size // 2 for size in self.grid)])
        y, cache = sparse_submanifold_conv3d(x, coords, shape, c)
        y, _ = sparse_submanifold_conv3d(y.relu(), coords, shape, d, neighbor_cache=cache)
        y, last, _ = sparse_conv3d(x + y, coords, shape, e, stride=(2, 2, 1), padding=1)
        return y, last, coords


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_cells_below_zero(gpu, tmp_path):
    """torchsparse 2.0 rounds them towards zero, which a package does not: such rows lie outside of its grid."""
    path = tmp_path / "model.sbp"
    with sparse_bridge.enable("torchsparse", mode="standin", profile="2.0"):
        import torchsparse as ts

        model = networks.ready(nn.Sequential(ts.nn.Conv3d(4, 8, 2, stride=2), ts.nn.Conv3d(8, 8, 3)))

        def scene(rows, seed):
            features, coords = networks.scene((16, 16, 32), rows, seed)
            return features, coords[:, [1, 2, 3, 0]].contiguous()

        def inputs(features, coords):
            return (ts.SparseTensor(features, coords),)

        played = Played(gpu, path, packaged(path, model, inputs(*scene(250, 1))))
        features, coords = scene(60, 2)
        for mine, theirs in zip(played(features, coords), expected(model, *inputs(features, coords)), strict=True):
            assert torch.equal(mine, theirs)
        coords[:3, 0] -= 20
        with pytest.raises(PlayerError, match="3 of 60 rows have coordinates outside of the grid"):
            played(features, coords)
        played.close()


@pytest.mark.parametrize("gpu", ["hip"], indirect=True)
def test_flex_gemms_strided_layers(gpu, tmp_path):
    """Rows ascend, as its default says."""
    grid, path = (16, 16, 32), tmp_path / "model.sbp"
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        model = networks.ready(Levels(grid, 2))
        played = Played(gpu, path, packaged(path, model, networks.scene(grid, 250, 1)))
        for seed, rows in enumerate((250, 37, ROWS)):
            features, coords = networks.scene(grid, rows, seed)
            wanted = expected(model, features, coords)
            played.poison()
            for mine, theirs in zip(played(features, coords), wanted, strict=True):
                assert mine.shape == theirs.shape and torch.equal(mine, theirs)
        played.close()
