"""Host time of the maps of new scenes:
`python -m tests.core.prefetch.map_time [--rounds N] [--train] [--scenes]`.

Networks of every framework run over scenes of ever new bounds on a GPU that is not there: Python
and torch's own operations on a few rows, and everything up to Triton's launcher, which does
nothing. Maps of the first scenes are built in torch; those of later ones are prefetched, and the
counters that the host reads of them are those of the first. Told is what `prefetch.provide` takes
in all of a scene: the CPU time of this thread, and how many operations of torch and launches.
Scenes: the time of the whole forward pass instead, in inference, where layers wait for what
follows: a GPU's host over a stream of new shapes, but for the driver's part of the launches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_bridge
from sparse_bridge.core.maps import coordinate_map, request
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.core.prefetch import batched_builder, prefetch
from sparse_bridge.core.prefetch.batched_builder import BatchedBuilder
from sparse_bridge.core.prefetch.recording import boxes_of, levels_with_unknown_bounds
from sparse_bridge.kernels.maps import (  # noqa: F401
    hash_table,
    level_bounds,
    mask_order,
    neighbor_lookup,
    new_rows,
    pair_batch,
    row_bounds,
    row_ranks,
    tile_batch,
)
from sparse_bridge.kernels.maps.neighbor_table import NeighborTable
from sparse_bridge.kernels.maps.tile_list import TileList
from sparse_bridge.kernels.runtime import launch
from sparse_bridge.kernels.runtime import target as targets
from sparse_bridge.tools.networks import minkowski, spconv, torchsparse
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud
from tests.fake_driver import entry_of
from tests.fake_gpu import HOPPER, Compiled, fake_gpu
from tests.host_time import pairs
from tests.rules import layers_deferred, products_unmade, row_kernels_on
from tests.walk_apis import pretended_gpu

__all__ = ["Counting", "networks", "streamed"]

_LEARNT = 4  # scenes until maps are prefetched, and some more
_SHAPE = (33, 40, 40)
_numbers = itertools.count()
Told = Callable[..., None]
Rows = Callable[[Any, int, int], int]


@dataclasses.dataclass
class Scene:
    """What asking for the maps of a scene took: seconds, operations of torch and launches; whole:
    seconds of the forward pass."""

    seconds: float = 0.0
    whole: float = 0.0
    operations: int = 0
    launches: int = 0


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def networks(voxels: Callable[[int], int] = lambda i: 80) -> Iterator[tuple[str, nn.Module, Callable[[int], Any]]]:
    """(framework and network, the network, what makes a scene of number i).  voxels: of it."""
    every = cloud(_SHAPE, 1)

    def given(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        coords = every[: voxels(i)].clone()
        return torch.zeros(len(coords), 4, dtype=torch.float16), coords

    def moved(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """With other bounds than the others."""
        features, coords = given(i)
        return features, coords + torch.tensor([0, 16 * i, 0, 0], dtype=torch.int32)

    with spconv_apis.standin() as module:
        sp: Any = module

        def grid(i: int) -> Any:
            shape = [_SHAPE[0] + 8, _SHAPE[1] + 16 * i, _SHAPE[2]]
            return sp.SparseConvTensor(*given(i), shape, 1)

        yield "spconv, SECOND", spconv.Second(sp), grid
        yield "spconv, U-Net", spconv.ResidualUNet(sp), grid
    with sparse_bridge.enable("torchsparse", mode="standin"):
        ts: Any = importlib.import_module("torchsparse")
        net = torchsparse.ResidualUNet(ts)
        yield "torchsparse, U-Net", net, lambda i: ts.SparseTensor(*moved(i))
    with sparse_bridge.enable("minkowski", mode="standin"):
        me: Any = importlib.import_module("MinkowskiEngine")
        net = minkowski.MinkUNet(me, in_channels=4)
        yield "MinkowskiEngine, U-Net", net, lambda i: me.SparseTensor(*moved(i))


@contextlib.contextmanager
def _maps_unmade(told: Told | None, rows: Rows | None) -> Iterator[None]:
    """Launches of maps do nothing but to be told of, and what the host reads says `rows`, or what
    the last scene had."""

    def sizes(self: Any, capacities: Any, read: Any, own: Any = BatchedBuilder.sizes) -> Any:
        counters: list[int] = []
        for place, length in zip(capacities, self.counter_lengths(), strict=True):
            found = self.last.rows[place] if rows is None else rows(self, place, capacities[place])
            counters += [-1, -1, -1, found - 1, *[-1] * (length - 4)]
        n, boxes = self.cmap.n_rows, boxes_of(self.cmap.box, self.steps)
        loose = [boxes[level] for level in levels_with_unknown_bounds(self.steps)]
        ends = [[*box.lo, *(a + b - 1 for a, b in zip(box.lo, box.size, strict=True))] for box in loose]
        return own(self, capacities, [counters, [n - 1, n - 1, -1, -1], *ends])

    class Told(Compiled):
        """Launches of a kernel, told of with its key."""

        def __init__(self, kernel: Any) -> None:
            super().__init__(entry_of(kernel))
            self.name = kernel.name

        def get(self, key: Any, default: Any = None) -> Any:
            return self.entry if told is None else (functools.partial(told, self.name, key), (), ())

    with fake_gpu() as gpu:
        for kernel in launch.REGISTRY.values():
            gpu.replaces(kernel, _compiled=Told(kernel))
        gpu.replaces(launch.Kernel, launch=_LAUNCH, _launch_slowly=lambda *_: None)  # the latter of products
        gpu.replaces(Rulebook, _derived_table=lambda book, side: _table(book.n_offsets, book.n_rows[side]))
        gpu.replaces(TileList, table=lambda tiles: _table(tiles.n_offsets, tiles.n_rows))
        # Maps and products have different numbers for the current GPU here.
        gpu.has(raw=mock.ANY, answers={batched_builder: HOPPER, coordinate_map: None})
        gpu.replaces(targets, device_index=lambda device: -1)
        gpu.replaces(BatchedBuilder, sizes=sizes)
        gpu.replaces(prefetch, _target=lambda cmap: HOPPER)
        yield


def _table(n_offsets: int, n_rows: int) -> NeighborTable:
    return NeighborTable(torch.full((n_offsets, n_rows), -1, dtype=torch.int32))


_LAUNCH = launch.Kernel.launch


def streamed(
    net: nn.Module,
    scene: Callable[[int], Any],
    rounds: int,
    train: bool = False,
    counting: Counting | None = None,
    told: Told | None = None,
    rows: Rows | None = None,
) -> list[Scene]:
    """What the maps of every scene took, by `rounds` of them.

    told: of every launch: the kernel's name, its key, and what its launcher is called with.  rows:
    of a level: (builder, place of its step, rows that there is room for) -> rows.
    """
    net = net.half().train(train)
    found: list[Scene] = []
    inside = [0]
    launched = [0]

    def timed(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if inside[0]:
                return own(*given)
            inside[0] = 1
            launched[0] = 0
            with counting or contextlib.nullcontext():
                before = len(counting.names) if counting else 0
                start = time.thread_time()
                made = own(*given)
                found[-1].seconds += time.thread_time() - start
                found[-1].operations += len(counting.names) - before if counting else 0
            found[-1].launches += launched[0]
            inside[0] = 0
            return made

        return call

    def noted(*given: Any) -> None:
        launched[0] += 1
        if told is not None:
            told(*given)

    prefetch.forget()
    before = request.registered()
    provider, listener = timed(prefetch.provide), timed(prefetch.announced)
    with pretended_gpu(), pairs(), _maps_unmade(noted if counting else told, rows):
        request.register(provider, listener)
        try:
            for _ in range(rounds + _LEARNT):
                x = None
                found.append(Scene())
                x = scene(next(_numbers))
                with torch.set_grad_enabled(train):
                    start = time.thread_time()
                    y = net(x)
                    found[-1].whole = time.thread_time() - start
                    if train:
                        _features(y).backward(_features(y).detach())
                y = None
        finally:
            request.register(*before)
    assert prefetch.counts()["prefetched"] >= rounds and not prefetch.counts()["dropped"]
    return found[_LEARNT:]


def _features(x: Any) -> Any:
    return next(getattr(x, name) for name in ("features", "feats", "F") if hasattr(x, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--names", action="store_true", help="of the operations of a scene")
    parser.add_argument("--scenes", action="store_true", help="whole forward passes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.scenes:
        return _scenes(given.rounds)
    for name, net, scene in networks():
        counting = Counting()
        last = streamed(net, scene, 2, given.train, counting)[-1]
        taken = [one.seconds * 1e3 for one in streamed(net, scene, given.rounds, given.train)]
        print(
            f"{name}: {last.operations} operations, {last.launches} launches, "
            f"{min(taken):.2f} ms, median {statistics.median(taken):.2f}",
            flush=True,
        )
        if given.names:
            names = counting.names[-last.operations :]
            print(sorted(((names.count(one), one) for one in set(names)), reverse=True))


def _scenes(rounds: int) -> None:
    for name, net, scene in networks():
        with layers_deferred(), row_kernels_on("cpu"), products_unmade():
            taken = [one.whole * 1e3 for one in streamed(net, scene, rounds + _LEARNT)][_LEARNT:]
        print(f"{name}: {min(taken):.2f} ms, median {statistics.median(taken):.2f}", flush=True)


if __name__ == "__main__":
    main()
