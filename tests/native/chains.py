"""Chains of convolutions at random, over the map of a network that is known."""

from __future__ import annotations

import random
from typing import Any

import torch

from sparse_bridge.core.compile.programs.conv_step import ChainStep, ConvStep, Link
from sparse_bridge.core.conv.plan import ConvForm
from sparse_bridge.core.maps.kernel_map import KernelMap
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.core.ops import pointwise
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.runtime.parts import Part
from tests.native.world import World

Chain = tuple[ChainStep, list[Any], list[Link]]


class Bench:
    """Chains over the map of a network's layers, on a GPU that is not there."""

    def __init__(self, world: World) -> None:
        self.world, self.net = world, world.net
        self.kmap = world.x.indice_dict["a"]._map
        self.x = torch.randn_like(world.features)
        width = self.x.shape[1]
        self.whole = torch.randn(1, width, width, dtype=self.x.dtype)  # of kernel volume 1

    def arguments(self, with_norm: bool) -> tuple[Any, ...]:
        """(weight, bias, mean, variance, gain, shift) of one of the layers."""
        conv = self.net.conv1
        norm = self.net.norm1 if with_norm else None
        vectors: tuple[Any, ...] = (None,) * 4
        if norm is not None:
            vectors = norm.running_mean, norm.running_var, norm.weight, norm.bias
        return conv.weight, conv.bias, *vectors

    def chain(self, seed: int, n_links: int = 12, escapes: float = 0.2) -> Chain:
        """A chain at random, and the arguments of its calls. Places: x, the map, weight, bias,
        vectors, a weight of kernel volume 1."""
        draw = random.Random(seed)
        args = [self.x, self.kmap, *self.arguments(True), self.whole]
        sources = [draw.choice([0, *range(len(args), len(args) + number)][-4:]) for number in range(n_links)]
        others = [
            draw.choice([0, *range(len(args), len(args) + number)]) if draw.random() < 0.4 else -1
            for number in range(n_links)
        ]
        links = []
        for number in range(n_links):
            place = len(args) + number
            readers = [at for at in range(n_links) if place in (sources[at], others[at])]
            escaped = not readers or draw.random() < escapes
            norm = draw.random() < 0.7
            vectors = (4, 5, 6, 7) if norm else (-1,) * 4
            own = draw.random() < 0.3
            form = pointwise.FORM if own else ConvForm("ovi")
            step = ConvStep(form, draw.random() < 0.3, 1e-3, draw.choice([None, "relu"]), 0.0)
            weight, kmap = (8, -1) if own else (2, 1)
            operands = sources[number], weight, 3, kmap, *vectors, others[number]
            links.append(Link(step, operands, -1 if escaped else max(readers)))
        return ChainStep(links, len(args), 4), args, links

    def widths(self, seed: int, n_links: int = 30) -> Chain:
        """A chain of products of rows, whose results have sizes of their own."""
        draw = random.Random(seed)
        width = self.x.shape[1]
        columns, args, sources = [width], [self.x], [0]
        for number in range(n_links):
            sources.append(draw.choice([0, *range(1, number + 1)][-4:]))
            columns.append(draw.choice([16, 32, 48, 64]))
            args.append(torch.randn(1, columns[sources[-1]], columns[-1], dtype=self.x.dtype))
        links = []
        for number, source in enumerate(sources[1:], 1):
            readers = [at - 1 for at in range(1, n_links + 1) if sources[at] == number]
            step = ConvStep(pointwise.FORM, False, 0.0, None, 0.0)
            place = source if source == 0 else len(args) + source - 1
            links.append(Link(step, (place, number, *(-1,) * 7), max(readers, default=-1)))
        return ChainStep(links, len(args), 4), args, links


def by_table(n_rows: int, n_offsets: int, symmetric: bool = False) -> KernelMap:
    """A map that nobody has ordered, whose tables are parts of a memory."""
    memory = torch.randint(-1, n_rows, (8 + n_offsets * n_rows,), dtype=torch.int32)
    center = n_offsets // 2 if symmetric else -1
    tables = [
        NeighborTable(Part(memory, 8, (n_offsets, n_rows))),
        None if symmetric else NeighborTable(torch.randint(n_rows, (n_offsets, n_rows)).int()),
    ]
    return KernelMap(
        Rulebook(n_rows, n_rows, n_offsets, memory.device, symmetric=symmetric, center=center, views=tables)
    )
