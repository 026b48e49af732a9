"""Programs that are compiled in the tests: networks from plain tensors to a plain tensor."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo import symbolic_convert

import sparse_bridge
from sparse_bridge.tools.networks import minkowski as for_minkowski
from sparse_bridge.tools.networks import spconv as for_spconv
from sparse_bridge.tools.networks import torchsparse as for_torchsparse
from tests.adapters.spconv import apis
from tests.clouds import cloud

GRID = (32, 32, 32)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
WHERE = (  # for what takes long on a CPU
    pytest.param("cpu", marks=pytest.mark.slow, id="cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
)


class Program(nn.Module):
    """network: takes and returns the framework's tensor.  wrap: makes it of features and
    coordinates.  read: makes a plain tensor of the result."""

    def __init__(self, network: nn.Module, wrap: Callable, read: Callable) -> None:
        super().__init__()
        self.network, self._wrap, self._read = network, wrap, read

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return self._read(self.network(self._wrap(features, coords)))


@contextlib.contextmanager
def spconv_programs(api: str) -> Iterator[dict[str, Callable[[], Program]]]:
    """Programs of spconv through one of its APIs, by name."""
    with apis.APIS[api]() as sp:

        def wrap(features, coords):
            return sp.SparseConvTensor(features, coords, list(GRID), 2)

        def dense(y):
            return y.dense()

        def features(y):
            return y.features

        def unit(conv):
            layers = conv, nn.BatchNorm1d(conv.out_channels), nn.ReLU()
            return sp.SparseSequential(*layers)

        def three():
            layers = (
                sp.SubMConv3d(4, 8, 3, indice_key="a"),
                sp.SparseConv3d(8, 8, 3, 2, 1),
                sp.SubMConv3d(8, 6, 3, indice_key="b"),
            )
            return Program(nn.Sequential(*map(unit, layers)), wrap, dense)

        def pools():
            layers = (
                sp.SubMConv3d(4, 8, 3, indice_key="a"),
                sp.SparseMaxPool3d(2, 2, indice_key="p"),
                sp.SubMConv3d(8, 6, 3, bias=False),
                sp.SparseInverseConv3d(6, 5, 2, "p"),
            )
            return Program(nn.Sequential(*layers), wrap, features)

        def second():
            return Program(for_spconv.Second(sp, 4, (4, 4, 6, 8), 10), wrap, dense)

        def unet():
            thin = {"encoder": (4, 6), "decoder": (6, 4), "stem": 4, "blocks": (1, 1)}
            return Program(for_spconv.ResidualUNet(sp, classes=5, **thin), wrap, features)

        yield {"three": three, "pools": pools, "second": second, "unet": unet}


def forget_modules() -> None:
    """Dynamo keeps modules by name, some in the globals of what it compiles; here other modules get
    the same names."""
    torch._dynamo.reset()
    if hasattr(symbolic_convert, "_import_module"):  # torch 2.7
        symbolic_convert._import_module.cache_clear()
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})
        for name in [name for name in held if name.startswith("__import_") and "_dot_" in name]:
            del held[name]


@contextlib.contextmanager
def torchsparse_programs(profile: str) -> Iterator[dict[str, Callable[[], Program]]]:
    """Programs of torchsparse, whose stand-in answers."""
    with sparse_bridge.enable("torchsparse", mode="standin", profile=profile):
        import torchsparse as ts
        import torchsparse.nn as spnn
        import torchsparse.nn.functional as F

        def wrap(features, coords):
            if profile != "2.1":
                coords = coords[:, [1, 2, 3, 0]].contiguous()
            return ts.SparseTensor(features, coords)

        def features(y):
            return y.feats

        def unit(*conv, **more):
            layer = spnn.Conv3d(*conv, **more)
            return nn.Sequential(layer, spnn.BatchNorm(layer.out_channels), spnn.ReLU(True))

        def three():
            layers = unit(4, 8, 3), unit(8, 8, 2, stride=2), unit(8, 6, 3)
            return Program(nn.Sequential(*layers), wrap, features)

        def unet():
            thin = {"encoder": (4, 6), "decoder": (6, 4), "stem": 4, "blocks": (1, 1, 1, 1)}
            return Program(for_torchsparse.ResidualUNet(ts, classes=5, **thin), wrap, features)

        class Points(nn.Module):
            """Points to voxels and back, as networks of points and voxels do it."""

            def __init__(self):
                super().__init__()
                self.first, self.last = spnn.Conv3d(4, 6, 3), spnn.Conv3d(6, 5, 3)

            def forward(self, features, coords):
                x = self.first(wrap(features, coords))
                cells = torch.cat([coords[:, :1], coords[:, 1:] // 2], 1)
                keys = F.sphash(cells)
                found = torch.unique(keys)
                place = F.sphashquery(keys, found).int()
                counts = F.spcount(place, len(found))
                means = F.spvoxelize(x.feats, place, counts)
                rows = F.sphashquery(keys, found).view(-1, 1).expand(-1, 8)
                weights = F.calc_ti_weights(coords[:, 1:].float() + 0.25, by_corner(rows), 1)
                x.feats = x.feats + F.spdevoxelize(means, rows.contiguous(), by_corner(weights))
                pools = spnn.GlobalAvgPool()(x), spnn.GlobalMaxPool()(x)
                return self.last(x).feats.mean(0) + torch.cat(pools).mean()

        def by_corner(table):
            return table if profile == "2.1" else table.t().contiguous()

        yield {"three": three, "unet": unet, "points": Points}


@contextlib.contextmanager
def minkowski_programs() -> Iterator[dict[str, Callable[[], Program]]]:
    """Programs of MinkowskiEngine, whose tensors are made before the graph."""
    with sparse_bridge.enable("minkowski", mode="standin"):
        import MinkowskiEngine as ME

        def wrap(features, coords):
            return ME.SparseTensor(features, coords)

        def features(y):
            return y.F

        def unit(c_in, c_out, k, **more):
            conv = ME.MinkowskiConvolution(c_in, c_out, kernel_size=k, dimension=3, **more)
            return nn.Sequential(conv, ME.MinkowskiBatchNorm(c_out), ME.MinkowskiReLU())

        def three():
            layers = unit(4, 8, 3), unit(8, 8, 2, stride=2), unit(8, 6, 3, bias=True)
            return Program(nn.Sequential(*layers), wrap, features)

        def unet():
            planes = (4, 6, 8, 8, 8, 6, 4, 4)
            made = for_minkowski.MinkUNet(ME, 4, 5, layers=(1,) * 8, planes=planes, init=4)
            return Program(made, wrap, features)

        def program_of(kind, read):
            return Program(kind(), wrap, read)

        def conv(c_in, c_out, k, kind=ME.MinkowskiConvolution, **more):
            return kind(c_in, c_out, kernel_size=k, dimension=3, **more)

        class Pools(nn.Module):
            """Every pool, onto maps of its own and onto known ones."""

            def __init__(self):
                super().__init__()
                self.first = conv(4, 6, 3)
                self.down = ME.MinkowskiMaxPooling(2, 2, dimension=3)
                self.windows = ME.MinkowskiMaxPooling(3, 2, dimension=3)
                self.mean = ME.MinkowskiAvgPooling(3, 2, dimension=3)
                self.cells = ME.MinkowskiAvgPooling(2, 2, dimension=3)
                self.sums = ME.MinkowskiSumPooling(2, 2, dimension=3)
                self.up = ME.MinkowskiPoolingTranspose(2, 2, dimension=3)
                self.wide = ME.MinkowskiPoolingTranspose(3, 2, dimension=3)

            def forward(self, x):
                x = self.first(x)
                y = self.down(x) + self.windows(x) + self.mean(x) + self.cells(x) + self.sums(x)
                return ME.cat(self.up(y), self.wide(y), x)

        class Gate(nn.Module):
            """A squeeze-and-excitation block: global pools, and what spreads them again."""

            def __init__(self):
                super().__init__()
                self.first, self.gate = conv(4, 6, 3), ME.MinkowskiLinear(6, 6)
                self.pools = nn.ModuleList(
                    (ME.MinkowskiGlobalAvgPooling(), ME.MinkowskiGlobalMaxPooling(), ME.MinkowskiGlobalSumPooling())
                )
                self.times = ME.MinkowskiBroadcastMultiplication()
                self.plus = ME.MinkowskiBroadcastAddition()
                self.beside = ME.MinkowskiBroadcastConcatenation()

            def forward(self, x):
                x = self.first(x)
                mean, most, total = (pool(x) for pool in self.pools)
                x = self.plus(self.times(x, ME.MinkowskiSigmoid()(self.gate(mean))), most)
                return self.beside(x, total)

        class Joins(nn.Module):
            """Sums of different maps, pruning, and layers onto given coordinates."""

            def __init__(self):
                super().__init__()
                self.first, self.down = conv(4, 6, 3), conv(6, 6, 2, stride=2)
                self.grow = conv(6, 6, 2, ME.MinkowskiGenerativeConvolutionTranspose, stride=2)
                self.score, self.back = conv(6, 1, 1), conv(6, 6, 3)
                self.union, self.prune = ME.MinkowskiUnion(), ME.MinkowskiPruning()
                self.again = conv(6, 5, 3, stride=2)

            def forward(self, x):
                x = self.first(x)
                y = self.grow(self.down(x))
                y = self.prune(y, self.score(y).F[:, 0] > 0)
                z = self.union(x, y) + self.back(y, x)
                return self.again(z - y)

        class Points(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.points = conv(4, 6, 3), ME.MinkowskiInterpolation()

            def forward(self, x):
                x = self.first(x)
                return x.F + self.points(x, x.C.to(x.F.dtype) + 0.25)

        made = {
            kind.__name__.lower(): functools.partial(program_of, kind, read)
            for kind, read in ((Pools, features), (Gate, features), (Joins, features))
        }
        yield {"three": three, "unet": unet, **made, "points": lambda: Program(Points(), wrap, lambda y: y)}


def _seeded(programs: Callable, *given: str) -> Callable:
    """`programs`, whose first network has the same parameters in every process."""

    @contextlib.contextmanager
    def enter() -> Iterator[dict[str, Callable[[], Program]]]:
        torch.manual_seed(0)
        try:
            with programs(*given) as found:
                yield found
        finally:
            forget_modules()

    return enter


PROGRAMS = {
    "spconv": _seeded(spconv_programs, "standin"),
    "patched spconv": _seeded(spconv_programs, "patch"),
    "torchsparse": _seeded(torchsparse_programs, "2.1"),
    "minkowski": _seeded(minkowski_programs),
    "torchsparse 1.4": _seeded(torchsparse_programs, "1.4"),
}
APIS = tuple(PROGRAMS)
NETWORKS = [(api, network) for api in APIS for network in ("second", "unet") if network == "unet" or "spconv" in api]


def scene(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, coordinates) of another size for every number."""
    coords = cloud(GRID, 2, 0.01 + 0.002 * number, seed=number)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(len(coords), 4, generator=generator), coords
