"""Levels of wide decoders for `benchmarks.memory`, through the APIs of two frameworks.

Levels have the rows and channels of TRELLIS.2's decoder, voxels of a surface; blocks are
ConvNeXt's: a submanifold 3x3x3 convolution, a layer norm, and an MLP of four times the width, whose
linear layers are torch's own. "cut": the program gives the MLP a part of the rows at a time.
"none": there is no MLP, and the norm is given its rows in parts, so that convolutions have the
peak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import sparse_bridge


class Level(NamedTuple):
    rows: int
    channels: int


LEVELS = {"97k x 1024": Level(97_000, 1024), "466k x 128": Level(466_000, 128)}
QUICK = {"1k x 32": Level(1_000, 32)}
MLPS = ("whole", "cut", "none")


def surface(rows: int, seed: int = 0) -> tuple[torch.Tensor, int]:
    """(coordinates int32 [rows, 4] of voxels near a sphere, the grid's extent)."""
    generator = torch.Generator().manual_seed(seed)
    extent = int((rows / 4) ** 0.5) + 8  # about twice the area, some voxels thick
    found = torch.empty((0, 3), dtype=torch.int64)
    while len(found) < rows:
        way = torch.randn((rows, 3), generator=generator, dtype=torch.float64)
        way /= way.norm(dim=1, keepdim=True)
        deep = torch.rand((rows, 1), generator=generator, dtype=torch.float64) * 3
        cells = ((way * (extent / 2 - 1 - deep)) + extent / 2).floor().long()
        found = torch.cat([found, cells]).unique(dim=0)
    found = found[torch.randperm(len(found), generator=generator)[:rows]]
    return torch.cat([torch.zeros(rows, 1, dtype=torch.int64), found], 1).int(), extent


class Block(nn.Module):
    """x + mlp(norm(conv(x))), or without the MLP.  mlp: of `MLPS`.  part: rows that are taken at a
    time where one says so."""

    def __init__(self, channels: int, mlp: str, part: int) -> None:
        super().__init__()
        self.kind, self.part = mlp, part
        self.norm = nn.LayerNorm(channels)
        if mlp != "none":
            self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, channels))

    def forward(self, x: torch.Tensor, conv: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """conv(x): features to features. It comes with each call, so that no map outlives a run."""
        h = conv(x)
        if self.kind == "none":
            return self._by_parts(self.norm, h).add_(x)
        h = self.norm(h)
        return (self.mlp(h) if self.kind == "whole" else self._by_parts(self.mlp, h)).add_(x)

    def _by_parts(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        for begin in range(0, len(h), self.part):
            rows = slice(begin, begin + self.part)
            h[rows] = layer(h[rows])
        return h


Convolve = Callable[[int, torch.Tensor], torch.Tensor]  # of a layer's number, and features


class Peaks:
    """The most bytes of torch's allocator on a GPU.  convolutions: while the bridge's layers compute.
    allocated, reserved: at any time."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.convolutions = 0

    def between(self) -> int:
        """Other operations come to an end; their peak."""
        counted = torch.cuda.memory_stats_as_nested_dict()
        peak: int = counted["allocated_bytes"]["all"]["peak"]
        self.allocated = max(self.allocated, peak)
        self.reserved = max(self.reserved, counted["reserved_bytes"]["all"]["peak"])
        torch.cuda.reset_peak_memory_stats()
        return peak

    def of_layer(self) -> None:
        """One of the bridge's layers has computed."""
        self.convolutions = max(self.convolutions, self.between())


class Network:
    """Blocks of a level.  prepare(coords): the layers over new maps."""

    def __init__(
        self, prepare: Callable[[torch.Tensor], Convolve], blocks: list[Block], coords: torch.Tensor, x: torch.Tensor
    ) -> None:
        self._prepare, self._blocks, self._coords, self._x = prepare, blocks, coords, x
        self._watch: Callable[[Convolve], Convolve] = lambda convolve: convolve

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        convolve, h = self._watch(self._prepare(self._coords.clone())), self._x
        for number, block in enumerate(self._blocks):
            h = block(h, functools.partial(convolve, number))
        return h

    @contextmanager
    def watched(self) -> Iterator[Peaks]:
        """Peaks of the runs meanwhile, on a GPU. The allocator's are reset before and behind each of
        the bridge's layers, so that none is refused for what others took."""
        peaks, before = Peaks(), self._watch

        def watched(convolve: Convolve) -> Convolve:
            def call(number: int, h: torch.Tensor) -> torch.Tensor:
                peaks.between()
                y = convolve(number, h)
                peaks.of_layer()
                return y

            return call

        if self._coords.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._watch = watched
        try:
            yield peaks
        finally:
            self._watch = before
            if self._coords.is_cuda:
                peaks.between()


@contextmanager
def network_of(
    api: str,
    level: Level,
    scene: tuple[torch.Tensor, int],
    mlp: str,
    part: int,
    device: str,
    dtype: torch.dtype,
    n_blocks: int,
) -> Iterator[Network]:
    """A level through one API.  scene: as `surface` makes one."""
    coords, extent = scene
    torch.manual_seed(0)
    c = level.channels
    with sparse_bridge.enable(api, mode="standin"):
        prepare = {"flex_gemm": _flex_gemm, "spconv": _spconv}[api](level, extent, device, dtype)
        with torch.device(device):  # where random numbers take no time
            blocks = [Block(c, mlp, part).to(dtype).eval() for _ in range(n_blocks)]
            x = torch.randn(level.rows, c, dtype=dtype)
        yield Network(prepare, blocks, coords.to(device), x)


def _flex_gemm(level: Level, extent: int, device: str, dtype: torch.dtype) -> Callable[..., Any]:
    from flex_gemm.ops.spconv import sparse_submanifold_conv3d

    c = level.channels
    weights = _weights(c, (c, 3, 3, 3, c), device, dtype)
    shape = torch.Size((1, c, extent, extent, extent))

    def prepare(coords: torch.Tensor) -> Convolve:
        caches: list[Any] = [None]

        def convolve(number: int, h: torch.Tensor) -> torch.Tensor:
            y, caches[0] = sparse_submanifold_conv3d(h, coords, shape, weights(number), None, caches[0])
            return y

        return convolve

    return prepare


def _spconv(level: Level, extent: int, device: str, dtype: torch.dtype) -> Callable[..., Any]:
    import spconv.pytorch as sp

    c, made = level.channels, {}
    weights = _weights(c, (c, 3, 3, 3, c), device, dtype)

    def layer(number: int) -> Any:
        if number not in made:
            with torch.device(device):
                made[number] = sp.SubMConv3d(c, c, 3, bias=False, indice_key="level")
            made[number].weight = nn.Parameter(weights(number), requires_grad=False)
        return made[number]

    def prepare(coords: torch.Tensor) -> Convolve:
        tensors: list[Any] = [None]

        def convolve(number: int, h: torch.Tensor) -> torch.Tensor:
            if tensors[0] is None:
                tensors[0] = sp.SparseConvTensor(h, coords, [extent] * 3, 1)
            tensors[0] = tensors[0].replace_feature(h)
            y: torch.Tensor = layer(number)(tensors[0]).features
            none = h.new_empty((0, h.shape[1]))  # a slice would keep h
            tensors[0] = tensors[0].replace_feature(none)  # the tensor keeps maps, not features
            return y

        return convolve

    return prepare


def _weights(channels: int, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    made: dict[int, torch.Tensor] = {}

    def weight(number: int) -> torch.Tensor:
        if number not in made:
            generator = torch.Generator(device).manual_seed(number)
            values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            made[number] = values.div_((27 * channels) ** 0.5)
        return made[number]

    return weight
