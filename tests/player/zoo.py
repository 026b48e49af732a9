"""Networks that people put on robots, in the APIs of four frameworks, small or as large as they are."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import sparse_bridge
from sparse_bridge.tools.networks import minkowski, torchsparse
from sparse_bridge.tools.networks import spconv as published
from tests.adapters.spconv import apis

from .networks import Model, ready


class Network(NamedTuple):
    """inputs: what the model takes of features and coordinates.  exact: layers of torch give no other bits than
    kernels of ours, as there are none but those that the bridge replaces."""

    model: nn.Module
    grid: tuple[int, ...]
    inputs: Any
    exact: bool = True


def _dense_unit(c_in: int, c_out: int, size: int = 3, step: int = 1, transposed: bool = False) -> nn.Sequential:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    padding = 0 if transposed else size // 2
    conv = kind(c_in, c_out, size, step, padding=padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out, eps=1e-3, momentum=0.01), nn.ReLU(inplace=True))


class BirdsEye(nn.Module):
    """Two stages over the bird's-eye view, joined, and heads: what stands behind SECOND and CenterPoint."""

    def __init__(self, channels: int, widths: tuple[int, int], heads: dict[str, int]) -> None:
        super().__init__()
        a, b = widths
        self.first = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(channels, a, 3, bias=False), nn.BatchNorm2d(a), nn.ReLU())
        self.first.extend([_dense_unit(a, a)])
        self.second = nn.Sequential(_dense_unit(a, b, 3, 2), _dense_unit(b, b))
        self.beside, self.up = _dense_unit(a, b, 1), _dense_unit(b, b, 2, 2, transposed=True)
        self.heads = nn.ModuleDict(
            {name: nn.Sequential(_dense_unit(2 * b, a), nn.Conv2d(a, n, 3, padding=1)) for name, n in heads.items()}
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        joined = torch.cat([self.beside(x), self.up(self.second(x))], 1)
        outputs = {name: head(joined) for name, head in self.heads.items()}
        return {name: y.sigmoid() if name == "heat" else y for name, y in outputs.items()}


class Detector(nn.Module):
    """A sparse encoder, its bird's-eye view, and `BirdsEye`; without heads the view itself, which BEVFusion joins with
    that of its cameras."""

    def __init__(
        self,
        sp: Any,
        encoder: nn.Module,
        grid: Any,
        n_items: int,
        heads: dict[str, int],
        wide: bool,
        last: bool = False,
    ) -> None:
        super().__init__()
        self.sp, self.encoder, self.last = sp, encoder, last
        self.grid, self.n_items = list(grid), n_items
        self.head: nn.Module | None = None
        if heads:
            channels = self.eval()(torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.int32)).shape[1]
            self.head = BirdsEye(channels, (128, 256) if wide else (16, 32), heads)

    @torch.no_grad()
    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> Any:
        dense = self.encoder(self.sp.SparseConvTensor(features, coords, self.grid, self.n_items)).dense()
        if self.last:  # the height is the last axis
            dense = dense.permute(0, 1, 4, 2, 3).contiguous()
        n, c, d, h, w = dense.shape
        view = dense.view(n, c * d, h, w)
        return view if self.head is None else self.head(view)


class ResidualEncoder(nn.Module):
    """CenterPoint's and BEVFusion's: residual blocks on four levels, then the height is squeezed."""

    def __init__(self, sp: Any, widths: tuple[int, ...], out: int, last: bool) -> None:
        super().__init__()
        squeezed, steps = ((1, 1, 3), (1, 1, 2)) if last else ((3, 1, 1), (2, 1, 1))

        def unit(conv: Any) -> Any:
            return sp.SparseSequential(conv, published.norm(conv.out_channels), nn.ReLU())

        layers = [unit(sp.SubMConv3d(4, widths[0], 3, bias=False, indice_key="res0"))]
        layers += [published.ResidualBlock(sp, widths[0], widths[0], "res0")]
        for level, (a, b) in enumerate(itertools.pairwise(widths), 1):
            layers += [unit(sp.SparseConv3d(a, b, 3, 2, padding=1, bias=False))]
            layers += [published.ResidualBlock(sp, b, b, f"res{level}")]
        self.layers = nn.Sequential(*layers, unit(sp.SparseConv3d(widths[-1], out, squeezed, steps, bias=False)))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class FullySparse(nn.Module):
    """Like VoxelNeXt's: levels down to a 32nd, heads on rows, no dense grid; rows of two levels come out."""

    def __init__(self, sp: Any, grid: Any, n_items: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.sp, self.grid, self.n_items = sp, list(grid), n_items
        stages = []
        for level, (a, b) in enumerate(itertools.pairwise((4, *widths))):
            first = sp.SparseConv3d(a, b, 3, 2, padding=1, bias=False) if level else sp.SubMConv3d(a, b, 3, bias=False)
            same = sp.SubMConv3d(b, b, 3, bias=False, indice_key=f"s{level}")
            stages.append(sp.SparseSequential(first, published.norm(b), nn.ReLU(), same, published.norm(b), nn.ReLU()))
        self.stages = nn.ModuleList(stages)
        self.heat = sp.SparseSequential(
            sp.SubMConv3d(widths[-2], widths[-2], 3, indice_key="heat"), nn.ReLU(), sp.SubMConv3d(widths[-2], 3, 1)
        )

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, ...]:
        levels = [self.sp.SparseConvTensor(features, coords, self.grid, self.n_items)]
        for stage in self.stages:
            levels.append(stage(levels[-1]))
        heat = self.heat(levels[-2])
        return heat.features, heat.indices, levels[-1].features, levels[-1].indices


class Latents(nn.Module):
    """TRELLIS's way with FlexGEMM: submanifold convolutions between norms of rows, and a projection."""

    def __init__(self, grid: Any, n_items: int, width: int) -> None:
        super().__init__()
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d

        self.conv, self.grid, self.n_items = sparse_submanifold_conv3d, list(grid), n_items
        sizes = [(width, 4), (width, width), (width, width)]
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(o, 3, 3, 3, i)) for o, i in sizes])
        self.biases = nn.ParameterList([nn.Parameter(torch.empty(o)) for o, _ in sizes])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in sizes])
        self.out = nn.Linear(width, 8)

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        x, cache = features, None
        for weight, bias, norm in zip(self.weights, self.biases, self.norms, strict=True):
            shape = torch.Size([self.n_items, x.shape[1], *self.grid])
            y, cache = self.conv(x, coords, shape, weight, bias, cache)
            x = torch.nn.functional.silu(norm(y)) + (x if x.shape == y.shape else 0)
        return self.out(x)


def _plain(features: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return features, coords


def _of_spconv(name: str, sp: Any, wide: bool, grid: Any, n_items: int) -> Network:
    widths = (16, 32, 64, 128) if wide else (8, 16, 16, 32)
    last, out = name == "BEVFusion", 128 if wide else 32
    if name.startswith("SECOND"):
        grid, sizes = grid or (41, 32, 32), (16, 32, 64, 64) if wide else widths
        encoder: nn.Module = published.Second(sp, widths=sizes, out_channels=out)
        heads = {"class": 2, "box": 14} if name == "SECOND" else {}
        return Network(Detector(sp, encoder, grid, n_items, heads, wide), grid, _plain, not heads)
    if name in ("CenterPoint", "BEVFusion"):
        if grid is None:
            grid = (32, 32, 41) if last else (41, 32, 32)
        elif last:
            grid = (*grid[1:], grid[0])
        encoder, heads = ResidualEncoder(sp, widths, out, last), {} if last else {"heat": 3, "box": 8}
        return Network(Detector(sp, encoder, grid, n_items, heads, wide, last), grid, _plain, last)
    if name == "VoxelNeXt":
        grid = grid or (40, 32, 32)
        return Network(FullySparse(sp, grid, n_items, (16, 32, 64, 128, 128, 128) if wide else widths), grid, _plain)
    assert name == "SparseUNet"
    grid, sizes = grid or (16, 16, 32), {} if wide else _SMALL
    return Network(Model(sp, published.ResidualUNet(sp, **sizes), grid, False, n_items), grid, _plain)


_SMALL: dict[str, Any] = {"encoder": (16, 32), "decoder": (32, 16), "blocks": (1, 1), "stem": 8}
_SPCONV = ("SECOND", "SECOND without heads", "CenterPoint", "VoxelNeXt", "BEVFusion", "SparseUNet")
NAMES = (*_SPCONV, "torchsparse U-Net", "MinkUNet", "FlexGEMM")


@contextlib.contextmanager
def network(name: str, wide: bool = False, grid: Any = None, n_items: int = 2) -> Iterator[Network]:
    """A network by its name, in eval mode with random weights, while its framework is served.

    grid: cells in z, y, x; BEVFusion has them in the order x, y, z, and so its `grid`."""
    with contextlib.ExitStack() as stack:
        if name in _SPCONV:
            own = _of_spconv(name, stack.enter_context(apis.standin()), wide, grid, n_items)
        else:
            framework = {"torchsparse U-Net": "torchsparse", "MinkUNet": "minkowski", "FlexGEMM": "flex_gemm"}[name]
            stack.enter_context(sparse_bridge.enable(framework, mode="standin"))
            grid = grid or (16, 16, 32)
            if framework == "torchsparse":
                ts = importlib.import_module("torchsparse")
                sizes = {} if wide else {**_SMALL, "blocks": (1,) * 4}
                unet = torchsparse.ResidualUNet(ts, **sizes)
                own = Network(unet, grid, lambda features, coords: (ts.SparseTensor(features, coords),))
            elif framework == "minkowski":
                me = importlib.import_module("MinkowskiEngine")
                small = {"layers": (1,) * 8, "planes": (8, 8, 16, 16, 16, 16, 8, 8), "init": 8, "stem": 3}
                unet = minkowski.MinkUNet(me, in_channels=4, **({} if wide else small))
                own = Network(unet, grid, lambda features, coords: (me.SparseTensor(features, coords),))
            else:
                own = Network(Latents(grid, n_items, 128 if wide else 16), grid, _plain, False)
        ready(own.model)
        yield own
