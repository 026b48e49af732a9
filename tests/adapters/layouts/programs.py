"""Small programs of every API, as functions of all tensors that a user hands over.

A program takes the framework and the tensors by name, and returns a function that runs it; those of `PARAMETERS` come
as parameters. Results are tensors, in tuples or alone.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core import functional
from tests.adapters.spconv import apis
from tests.adapters.torchsparse.conftest import speaking

Tensors = dict[str, torch.Tensor]
Program = Callable[..., Callable[[], Any]]
PARAMETERS = ("weight", "bias", "gain", "shift", "second")
SHAPE = (5, 6, 4)


def sites(dimension: int = 3, batch: str = "first", n_rows: int = 40) -> torch.Tensor:
    """Distinct coordinates int32 [N, 1 + D] in two batch items."""
    generator = torch.Generator().manual_seed(5)
    size = (2, *SHAPE[:dimension])
    flat = torch.randperm(torch.tensor(size).prod().item(), generator=generator)[:n_rows]
    rows = torch.stack(torch.unravel_index(flat, size), 1).int()
    return rows.contiguous() if batch == "first" else rows.roll(-1, 1).contiguous()


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


def give(module: nn.Module, **parameters: torch.Tensor) -> None:
    """Put parameters into a module, as they lie."""
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter if type(parameter) is nn.Parameter else nn.Parameter(parameter))


def norm_of(norm: nn.Module, gain: torch.Tensor, shift: torch.Tensor) -> None:
    give(norm, weight=gain, bias=shift)
    norm.running_mean, norm.running_var = gain.detach() * 0.5, shift.detach().abs() + 0.5


# ---- spconv ---------------------------------------------------------------------------------------


def _spconv_net(dims: int, kind: str, evaluates: bool, **options: Any) -> Program:
    def program(sp, features, indices, weight, bias, gain, shift):
        layer = getattr(sp, f"{kind}{dims}d")(8, 6, 3, bias=True, indice_key="key", **options)
        norm, relu = nn.BatchNorm1d(6), nn.ReLU()
        give(layer, weight=weight, bias=bias)
        norm_of(norm, gain, shift)
        net = sp.SparseSequential(layer, norm, relu).train(not evaluates)
        return lambda: net(sp.SparseConvTensor(features, indices, list(SHAPE[:dims]), 2)).features

    return program


def _spconv_tensors(dims: int) -> Tensors:
    kernel = [3] * dims
    return {
        "features": numbers(40, 8),
        "indices": sites(dims),
        "weight": numbers(6, *kernel, 8),
        "bias": numbers(6),
        "gain": numbers(6),
        "shift": numbers(6) * 0.3,
    }


def _spconv_up(sp, features, indices, weight, second):
    down, up = sp.SparseConv3d(8, 6, 3, 2, 1, indice_key="a", bias=False), sp.SparseInverseConv3d(6, 8, 3, "a", False)
    give(down, weight=weight)
    give(up, weight=second)

    def run():
        y = up(down(sp.SparseConvTensor(features, indices, list(SHAPE), 2)))
        return y.features, y.dense()

    return run


def _spconv_point(sp, features, indices, weight, bias):
    layer = sp.SubMConv3d(8, 6, 1)
    give(layer, weight=weight, bias=bias)
    return lambda: layer(sp.SparseConvTensor(features, indices, list(SHAPE), 2)).features


def _spconv_pools(sp, features, indices):
    pools = [sp.SparseMaxPool3d(2, 2), sp.SparseAvgPool3d(2, 2), sp.SparseGlobalMaxPool(), sp.SparseGlobalAvgPool()]

    def run():
        x = sp.SparseConvTensor(features, indices, list(SHAPE), 2)
        results = [pool(x) for pool in pools]
        return [getattr(y, "features", y) for y in results]

    return run


def _spconv_add(sp, features, more, indices):
    def run():
        x = sp.SparseConvTensor(features, indices, list(SHAPE), 2)
        y = sp.functional.sparse_add(x, x.replace_feature(more))
        return (x + more).features, y.features, x.replace_feature(more).features

    return run


SPCONV: dict[str, tuple[Program, Tensors]] = {
    "SubMConv2d": (_spconv_net(2, "SubMConv", False), _spconv_tensors(2)),
    "SubMConv3d": (_spconv_net(3, "SubMConv", False), _spconv_tensors(3)),
    "SubMConv3d, inference": (_spconv_net(3, "SubMConv", True), _spconv_tensors(3)),
    "SparseConv2d, inference": (_spconv_net(2, "SparseConv", True, stride=2), _spconv_tensors(2)),
    "SparseConvTranspose3d": (_spconv_net(3, "SparseConvTranspose", False, stride=2), _spconv_tensors(3)),
    "down and up": (
        _spconv_up,
        {
            "features": numbers(40, 8),
            "indices": sites(),
            "weight": numbers(6, 3, 3, 3, 8),
            "second": numbers(8, 3, 3, 3, 6),
        },
    ),
    "one offset": (
        _spconv_point,
        {"features": numbers(40, 8), "indices": sites(), "weight": numbers(6, 1, 1, 1, 8), "bias": numbers(6)},
    ),
    "pools": (_spconv_pools, {"features": numbers(40, 8), "indices": sites()}),
    "sums": (_spconv_add, {"features": numbers(40, 8), "more": numbers(40, 8).flip(0), "indices": sites()}),
}

# ---- torchsparse ----------------------------------------------------------------------------------


def _torchsparse_net(evaluates: bool, **options: Any) -> Program:
    def program(ts, feats, coords, weight, bias, gain, shift):
        layer, norm = ts.nn.Conv3d(8, 6, 3, bias=True, **options), ts.nn.BatchNorm(6)
        give(layer, kernel=weight, bias=bias)
        norm_of(norm, gain, shift)
        net = nn.Sequential(layer, norm, ts.nn.ReLU()).train(not evaluates)
        return lambda: net(ts.SparseTensor(feats, coords)).feats

    return program


def _torchsparse_function(ts, feats, coords, weight, bias):
    return lambda: ts.nn.functional.conv3d(ts.SparseTensor(feats, coords), weight, 3, bias, stride=2).feats


def _torchsparse_pools(ts, feats, coords):
    pools = ts.nn.functional.global_avg_pool, ts.nn.functional.global_max_pool
    return lambda: [pool(ts.SparseTensor(feats, coords)) for pool in pools]


def _torchsparse_points(ts, feats, coords, index, weights):
    F = ts.nn.functional

    def run():
        codes = F.sphash(coords)
        voxels = F.spvoxelize(feats, index[0], F.spcount(index[0], 40))
        return voxels, F.spdevoxelize(feats, index.t(), weights), F.sphashquery(codes, codes)

    return run


def _torchsparse_dense(ts, feats, coords):
    return lambda: ts.utils.to_dense(feats, coords, (2, *SHAPE))


def _torchsparse_tensors() -> Tensors:
    return {"feats": numbers(40, 8), "coords": sites(), "weight": numbers(27, 8, 6), "bias": numbers(6)}


_NORM = {"gain": numbers(6), "shift": numbers(6) * 0.3}
TORCHSPARSE: dict[str, tuple[Program, Tensors]] = {
    "Conv3d": (_torchsparse_net(False), {**_torchsparse_tensors(), **_NORM}),
    "Conv3d, inference": (_torchsparse_net(True, stride=2), {**_torchsparse_tensors(), **_NORM}),
    "conv3d": (_torchsparse_function, _torchsparse_tensors()),
    "pools": (_torchsparse_pools, {"feats": numbers(40, 8), "coords": sites()}),
    "points": (
        _torchsparse_points,
        {
            "feats": numbers(40, 8),
            "coords": sites(),
            "index": torch.randint(0, 40, (8, 40), generator=torch.Generator().manual_seed(1)).int(),
            "weights": numbers(40, 8),
        },
    ),
    "to_dense": (_torchsparse_dense, {"feats": numbers(40, 8), "coords": sites()}),
}

# ---- MinkowskiEngine ------------------------------------------------------------------------------


def _minkowski_net(evaluates: bool, **options: Any) -> Program:
    def program(ME, features, coordinates, weight, bias, gain, shift):
        layer = ME.MinkowskiConvolution(8, 6, 3, bias=True, dimension=3, **options)
        norm = ME.MinkowskiBatchNorm(6)
        give(layer, kernel=weight, bias=bias)
        norm_of(norm.bn, gain, shift)
        net = nn.Sequential(layer, norm, ME.MinkowskiReLU()).train(not evaluates)
        return lambda: net(ME.SparseTensor(features, coordinates)).F

    return program


def _minkowski_more(ME, features, coordinates, weight, second):
    down, up = (
        ME.MinkowskiConvolution(8, 6, 2, 2, dimension=3),
        ME.MinkowskiGenerativeConvolutionTranspose(6, 8, 2, 2, dimension=3),
    )
    give(down, kernel=weight)
    give(up, kernel=second)

    def run():
        x = ME.SparseTensor(features, coordinates)
        return up(down(x)).F

    return run


def _minkowski_each(ME, features, coordinates, weight, bias):
    layer = ME.MinkowskiChannelwiseConvolution(8, 3, bias=True, dimension=3)
    give(layer, kernel=weight, bias=bias)
    return lambda: layer(ME.SparseTensor(features, coordinates)).F


def _minkowski_linear(ME, features, coordinates, weight, bias):
    layer, point = ME.MinkowskiLinear(8, 6), ME.MinkowskiConvolution(8, 6, 1, bias=True, dimension=3)
    give(layer.linear, weight=weight, bias=bias)
    give(point, kernel=weight.t().detach(), bias=bias[None].detach())

    def run():
        x = ME.SparseTensor(features, coordinates)
        return layer(x).F, point(x).F

    return run


def _minkowski_pools(ME, features, coordinates, mask, points):
    pools = [
        ME.MinkowskiMaxPooling(2, 2, dimension=3),
        ME.MinkowskiAvgPooling(3, 2, dimension=3),
        ME.MinkowskiSumPooling(2, 2, dimension=3),
        ME.MinkowskiGlobalAvgPooling(),
        ME.MinkowskiGlobalMaxPooling(),
        ME.MinkowskiInstanceNorm(8),
    ]

    def run():
        x = ME.SparseTensor(features, coordinates)
        pruned = ME.MinkowskiPruning()(x, mask).F
        return [*(pool(x).F for pool in pools), pruned, ME.MinkowskiInterpolation()(x, points), x.dense()[0]]

    return run


def _minkowski_field(ME, features, coordinates):
    def run():
        field = ME.TensorField(features, coordinates)
        return field.sparse().F, field.sparse().slice(field).F

    return run


_ME = {"features": numbers(40, 8), "coordinates": sites()}
MINKOWSKI: dict[str, tuple[Program, Tensors]] = {
    "MinkowskiConvolution": (
        _minkowski_net(False),
        {**_ME, "weight": numbers(27, 8, 6), "bias": numbers(1, 6), **_NORM},
    ),
    "MinkowskiConvolution, inference": (
        _minkowski_net(True, stride=2),
        {**_ME, "weight": numbers(27, 8, 6), "bias": numbers(1, 6), **_NORM},
    ),
    "down and up": (_minkowski_more, {**_ME, "weight": numbers(8, 8, 6), "second": numbers(8, 6, 8)}),
    "MinkowskiChannelwiseConvolution": (_minkowski_each, {**_ME, "weight": numbers(27, 8), "bias": numbers(1, 8)}),
    "MinkowskiLinear": (_minkowski_linear, {**_ME, "weight": numbers(6, 8), "bias": numbers(6)}),
    "pools": (
        _minkowski_pools,
        {**_ME, "mask": numbers(40, 1)[:, 0] > 0, "points": torch.cat([sites()[:9, :1], numbers(9, 3).abs()], 1)},
    ),
    "TensorField": (_minkowski_field, {**_ME, "coordinates": sites().float()}),
}

# ---- core.functional ------------------------------------------------------------------------------


def _functional_net(layout: str, groups: int, evaluates: bool) -> Program:
    def program(F, x, coords, weight, bias):
        voxels = F.coordinate_map(coords, SHAPE, 2)
        same = F.submanifold(voxels, F.kernel_offsets((3, 3, 3)))
        end = {"activation": "relu"} if evaluates else {}
        return lambda: F.conv(x, weight, bias, same, layout=layout, groups=groups, **end)

    return program


def _functional_pools(F, x, coords):
    voxels = F.coordinate_map(coords, SHAPE, 2)
    _, down = F.strided(voxels, F.kernel_offsets((2, 2, 2), padding=0), stride=2)
    modes = "max", "avg", "sum"
    return lambda: [*(F.pool(x, down, mode) for mode in modes), F.global_pool(x, coords[:, 0], 2, "avg")]


def _functional_pairs(F, x, rows, weight):
    kmap = F.kernel_map([(rows[0], rows[1]), (rows[1], rows[0])], 40, 40)
    return lambda: F.conv(x, weight, None, kmap)


def _relational(F, x, edges, kinds, weight, bias, second):
    layer = F.RelationalConv(8, 6, 3)
    give(layer, weight=weight, bias=bias, root=second)
    return lambda: layer(x, edges, kinds)


def _ovi(groups: int = 1) -> Tensors:
    return {"x": numbers(40, 8), "coords": sites(), "weight": numbers(6, 3, 3, 3, 8 // groups), "bias": numbers(6)}


def _vio(groups: int = 1) -> Tensors:
    return {"x": numbers(40, 8), "coords": sites(), "weight": numbers(27, 8 // groups, 6), "bias": numbers(6)}


def edges() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    return {
        "edges": torch.randint(0, 40, (2, 90), generator=generator),
        "kinds": torch.randint(0, 3, (90,), generator=generator),
    }


_GRAPH = {"x": numbers(40, 8), **edges(), "weight": numbers(3, 8, 6), "bias": numbers(6), "second": numbers(8, 6)}
FUNCTIONAL: dict[str, tuple[Program, Tensors]] = {
    "conv ovi": (_functional_net("ovi", 1, False), _ovi()),
    "conv ovi, groups": (_functional_net("ovi", 2, False), _ovi(2)),
    "conv vio": (_functional_net("vio", 1, False), _vio()),
    "conv vio, groups": (_functional_net("vio", 2, False), _vio(2)),
    "pools": (_functional_pools, {"x": numbers(40, 8), "coords": sites()}),
    "kernel_map": (
        _functional_pairs,
        {"x": numbers(40, 8), "rows": torch.randperm(40).view(2, 20), "weight": numbers(2, 8, 6)},
    ),
    "RelationalConv": (_relational, _GRAPH),
}

# ---- PyG ------------------------------------------------------------------------------------------


def _graph_layer(kind: str) -> Program:
    def program(pyg, x, edges, kinds, weight, bias, second):
        layer = getattr(pyg, kind)(8, 6, 3)
        give(layer, weight=weight, bias=bias, root=second)
        return lambda: layer(x, edges, kinds)

    return program


GRAPHS: dict[str, tuple[Program, Tensors]] = {
    kind: (_graph_layer(kind), _GRAPH) for kind in ("RGCNConv", "FastRGCNConv")
}


@contextlib.contextmanager
def _minkowski() -> Iterator[Any]:
    with sparse_bridge.enable("minkowski"):
        yield importlib.import_module("MinkowskiEngine")


@contextlib.contextmanager
def _graphs() -> Iterator[Any]:
    pyg = pytest.importorskip("torch_geometric.nn")
    with sparse_bridge.enable("torch_geometric"):
        yield pyg


# How a program meets an API, and the programs.
APIS: dict[str, tuple[Callable[[], Any], dict[str, tuple[Program, Tensors]]]] = {
    "spconv": (apis.standin, SPCONV),
    "spconv patched": (apis.patched, SPCONV),
    "torchsparse": (lambda: speaking("2.1"), TORCHSPARSE),
    "minkowski": (_minkowski, MINKOWSKI),
    "functional": (lambda: contextlib.nullcontext(functional), FUNCTIONAL),
    "torch_geometric": (_graphs, GRAPHS),
}
CASES = [(api, name) for api, (_, programs) in APIS.items() for name in programs]
