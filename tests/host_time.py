"""Host time of a layer in inference: `python -m tests.host_time [--stream | --steps] [--rounds N]`.

Convolution, norm and activation of every framework on a GPU that is not there: Python, torch's own
operations on a few rows, and everything up to Triton's launcher, which does nothing. Apart: as a
small scene goes. Deferred: the norm and the activation become part of the convolution's launch.
Sums: with features added before the activation. Training: forward, and forward and backward.
Stream: scenes through a U-Net of 55 to 63 convolutions instead; every scene brings new maps, whose
building is left out, and the layers are deferred in every other one. Steps: training steps of these U-Nets
over such scenes, of few voxels, the frameworks in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core.maps.pair_lists import DevicePairs
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.core.maps.views.derived import Derived
from sparse_bridge.core.ops import batch_norm
from sparse_bridge.tools.networks import minkowski, spconv, torchsparse
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud
from tests.fake_gpu import HOPPER
from tests.rules import layers_deferred
from tests.walk_apis import pretended_gpu

__all__ = ["layers", "pairs", "steps", "stream", "streamed", "sums", "times"]

_ROWS, _CHANNELS = 24, 32
_HOW = {"apart": 1 << 62, "deferred": 0}
Run = Callable[[], Any]


def layers(training: bool = False) -> Iterator[tuple[str, Run]]:
    """(framework and how its program is written, one call of the three layers)."""
    with mock.patch.object(nn.Module, "eval", nn.Module.train) if training else contextlib.nullcontext():
        yield from _layers(training)


def _layers(training: bool) -> Iterator[tuple[str, Run]]:
    coords, shape = cloud((16, 16, 16), 1)[:_ROWS].contiguous(), [16, 16, 16]
    features, n = torch.zeros(_ROWS, _CHANNELS, dtype=torch.float16), _CHANNELS
    features.requires_grad_(training)
    with spconv_apis.standin() as module:
        sp: Any = module
        one = sp.SubMConv3d(n, n, 3, indice_key="a").half().eval()
        x = one(sp.SparseConvTensor(features, coords, shape, 1)).replace_feature(features)
        yield "spconv, replace_feature", _idiom(sp.SubMConv3d(n, n, 3, indice_key="a"), x)
        parts = sp.SubMConv3d(n, n, 3, indice_key="a"), nn.BatchNorm1d(n), nn.ReLU()
        container = sp.SparseSequential(*parts).half().eval()
        yield "spconv, SparseSequential", lambda: container(x).features
    with sparse_bridge.enable("torchsparse", mode="standin"):
        ts: Any = importlib.import_module("torchsparse")
        tnn: Any = importlib.import_module("torchsparse.nn")
        x = ts.SparseTensor(features, coords)
        a, b, c = (part.half().eval() for part in (tnn.Conv3d(n, n, 3), tnn.BatchNorm(n), tnn.ReLU()))
        yield "torchsparse, one by one", lambda: c(b(a(x))).feats
        row = nn.Sequential(tnn.Conv3d(n, n, 3), tnn.BatchNorm(n), tnn.ReLU()).half().eval()
        yield "torchsparse, nn.Sequential", lambda: row(x).feats
    with sparse_bridge.enable("minkowski", mode="standin"):
        me: Any = importlib.import_module("MinkowskiEngine")
        parts = me.MinkowskiConvolution(n, n, kernel_size=3, dimension=3), me.MinkowskiBatchNorm(n)
        d, e, f = (part.half().eval() for part in (*parts, me.MinkowskiReLU()))
        x = me.SparseTensor(features, coords)
        yield "MinkowskiEngine", lambda: f(e(d(x))).F


def _idiom(conv: Any, x: Any, added: Any = None) -> Run:
    conv, norm, relu = conv.half().eval(), nn.BatchNorm1d(_CHANNELS).half().eval(), nn.ReLU()

    def run() -> Any:
        y = conv(x)
        return y.replace_feature(relu(norm(y.features))).features

    def summed() -> Any:
        y = conv(x)
        y = y.replace_feature(norm(y.features))
        y = y.replace_feature(y.features + added)
        return y.replace_feature(relu(y.features)).features

    return run if added is None else summed


def sums() -> Iterator[tuple[str, Run]]:
    """The same of the end of a residual block."""
    coords, shape = cloud((16, 16, 16), 1)[:_ROWS].contiguous(), [16, 16, 16]
    features, n = torch.zeros(_ROWS, _CHANNELS, dtype=torch.float16), _CHANNELS
    with spconv_apis.standin() as module:
        sp: Any = module
        one = sp.SubMConv3d(n, n, 3, indice_key="a").half().eval()
        x = one(sp.SparseConvTensor(features, coords, shape, 1)).replace_feature(features)
        run = _idiom(sp.SubMConv3d(n, n, 3, indice_key="a"), x, features)
        yield "spconv, replace_feature, sum", run
    with sparse_bridge.enable("torchsparse", mode="standin"):
        ts: Any = importlib.import_module("torchsparse")
        tnn: Any = importlib.import_module("torchsparse.nn")
        x, relu = ts.SparseTensor(features, coords), tnn.ReLU()
        row = nn.Sequential(tnn.Conv3d(n, n, 3), tnn.BatchNorm(n)).half().eval()
        yield "torchsparse, nn.Sequential, sum", lambda: relu(row(x) + x).feats
    with sparse_bridge.enable("minkowski", mode="standin"):
        me: Any = importlib.import_module("MinkowskiEngine")
        parts = me.MinkowskiConvolution(n, n, kernel_size=3, dimension=3), me.MinkowskiBatchNorm(n)
        d, e, f = (part.half().eval() for part in (*parts, me.MinkowskiReLU()))
        x = me.SparseTensor(features, coords)
        yield "MinkowskiEngine, sum", lambda: f(e(d(x)) + x).F


@contextlib.contextmanager
def pairs() -> Iterator[None]:
    """Maps of a GPU that is not there have pair lists."""
    rows = torch.zeros(_ROWS, dtype=torch.int32)
    lists = DevicePairs(rows, rows, torch.zeros(28, dtype=torch.int64), False, _ROWS, 1)
    with mock.patch.object(Rulebook, "device_pairs", lambda self, target: lists):
        yield


def times(run: Run, rounds: int, calls: int = 200) -> tuple[float, float]:
    """(least, median) microseconds of this thread per call, over `rounds` of so many calls."""
    for _ in range(10):
        run()
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            run()
        found.append((time.thread_time() - start) / calls * 1e6)
    return min(found), statistics.median(found)


def stream(voxels: int = 400, **sizes: Any) -> Iterator[tuple[str, nn.Module, Callable[[], Any]]]:
    """(framework, a U-Net, what makes a scene); sizes: of the U-Net, where it is not the whole."""
    coords, shape = cloud((32, 32, 32), 1)[:voxels].contiguous(), [32, 32, 32]
    features = torch.zeros(len(coords), 4, dtype=torch.float16)
    with spconv_apis.standin() as module:
        sp: Any = module
        x = sp.SparseConvTensor(features, coords, shape, 1)
        yield "spconv", spconv.ResidualUNet(sp, **sizes), lambda: x.replace_feature(features)
    with sparse_bridge.enable("torchsparse", mode="standin"):
        ts: Any = importlib.import_module("torchsparse")
        a = ts.SparseTensor(features, coords)

        def again() -> Any:
            made = ts.SparseTensor(features, coords)
            made._caches = a._caches
            return made

        yield "torchsparse", torchsparse.ResidualUNet(ts, **sizes), again
    with sparse_bridge.enable("minkowski", mode="standin"):
        me: Any = importlib.import_module("MinkowskiEngine")
        b = me.SparseTensor(features, coords)
        place = {"coordinate_map_key": b.coordinate_map_key, "coordinate_manager": b.coordinate_manager}
        net = minkowski.MinkUNet(me, in_channels=4, **_of_minkowski(sizes))
        yield "MinkowskiEngine", net, lambda: me.SparseTensor(features, **place)


def _of_minkowski(sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes in MinkUNet's words."""
    if not sizes:
        return {}
    planes = *sizes["encoder"], *sizes["decoder"]
    return {"planes": planes, "layers": (1,) * 8, "init": sizes["stem"]}


def streamed(net: nn.Module, scene: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of this thread for every scene, by whether the layers are deferred; in turns."""
    nets = {how: copy.deepcopy(net).half().eval() for how in _HOW}
    net = net.half().eval()
    before = {id(one) for one in gc.get_objects() if type(one) is Rulebook}
    with torch.no_grad():
        with settings.override(dataflow="per_offset"):
            kept = net(scene()), scene()  # with all maps
        books = _books_since(before)
        found: dict[str, list[float]] = {how: [] for how in _HOW}
        with pretended_gpu():
            for _ in range(rounds + 6):
                for how, worth in _HOW.items():
                    for book in books:
                        book.cache = Derived()
                    x = scene()
                    with layers_deferred(worth):
                        start = time.thread_time()
                        nets[how](x)
                        found[how].append((time.thread_time() - start) * 1e3)
    del kept
    return {how: taken[6:] for how, taken in found.items()}


def _books_since(before: set[int]) -> list[Rulebook]:
    """The maps that others than `before` have, with the views that kernels would make."""
    found = [one for one in gc.get_objects() if type(one) is Rulebook and id(one) not in before]
    for book in found:
        book.table(0), book.table(1)
    return found


def steps(rounds: int, **sizes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of this thread for the forward and backward passes of all steps, by framework.

    Few voxels: what torch computes on a CPU of norms and sums is not the host's time on a GPU.
    """
    streams = [(name, net.half().train(), scene) for name, net, scene in stream(_ROWS, **sizes)]
    before = {id(one) for one in gc.get_objects() if type(one) is Rulebook}
    with settings.override(dataflow="per_offset"):
        kept = [(net(scene()), scene()) for _, net, scene in streams]  # with all maps
    books = _books_since(before)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _, _ in streams}
    # A GPU's answer is remembered.
    with pretended_gpu() as gpu, pairs():
        gpu.has(answers={batch_norm: HOPPER})
        for number, (name, net, scene) in itertools.product(range(rounds + 4), streams):
            for book in books:
                book.cache = Derived()
            net.zero_grad(set_to_none=True)
            x = scene()
            start = time.thread_time()
            y = _features(net(x))
            middle = time.thread_time()
            y.backward(y.detach())
            if number >= 4:
                found[name][0].append((middle - start) * 1e3)
                found[name][1].append((time.thread_time() - middle) * 1e3)
    del kept
    return found


def _features(x: Any) -> Any:
    return next(getattr(x, name) for name in ("features", "feats", "F") if hasattr(x, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.steps:
        for name, passes in steps(given.rounds).items():
            said = [f"{min(one):.2f} ms, median {statistics.median(one):.2f}" for one in passes]
            print(f"{name}, training step: forward {said[0]}, backward {said[1]}")
        return
    if given.stream:
        for name, net, scene in stream():
            for how, taken in streamed(net, scene, given.rounds).items():
                least, median = min(taken), statistics.median(taken)
                print(f"{name}, stream, {how}: {least:.2f} ms, median {median:.2f}", flush=True)
        return
    _single(given.rounds)


def _single(rounds: int) -> None:
    for how, worth in _HOW.items():
        with torch.no_grad(), pretended_gpu(), layers_deferred(worth):
            for name, run in itertools.chain(layers(), sums()):
                print(f"{name}, {how}: {_said(times(run, rounds))}")
    with pretended_gpu(), pairs():
        for name, run in layers(training=True):
            print(f"{name}, training, forward: {_said(times(run, rounds))}")
            print(f"{name}, training, both: {_said(times(_with_backward(run), rounds))}")


def _with_backward(run: Run) -> Run:
    seed = torch.zeros(_ROWS, _CHANNELS, dtype=torch.float16)
    return lambda: run().backward(seed)


def _said(found: tuple[float, float]) -> str:
    return f"{found[0]:.1f} us, median {found[1]:.1f}"


if __name__ == "__main__":
    main()
