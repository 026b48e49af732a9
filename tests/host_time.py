"""Host time of a layer in inference: `python -m tests.host_time [--rounds N]`.

Convolution, norm and activation of every framework on a GPU that is not there: Python, torch's own
operations on a few rows, and everything up to Triton's launcher, which does nothing. Apart: as a
small scene goes. Waiting: the norm and the activation become part of the convolution's launch.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import sparse_bridge
from sparse_bridge.core.conv import convolution
from tests.adapters.spconv import doors as spconv_doors
from tests.clouds import cloud
from tests.walk_doors import pretended_gpu

__all__ = ["layers", "times"]

_ROWS, _CHANNELS = 24, 32
Run = Callable[[], Any]


def layers() -> Iterator[tuple[str, Run]]:
    """(framework and how its program is written, one call of the three layers)."""
    coords, shape = cloud((16, 16, 16), 1)[:_ROWS].contiguous(), [16, 16, 16]
    features, n = torch.zeros(_ROWS, _CHANNELS, dtype=torch.float16), _CHANNELS
    with spconv_doors.standin() as module:
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
        a, b, c = (
            part.half().eval() for part in (tnn.Conv3d(n, n, 3), tnn.BatchNorm(n), tnn.ReLU())
        )
        yield "torchsparse, one by one", lambda: c(b(a(x))).feats
        row = nn.Sequential(tnn.Conv3d(n, n, 3), tnn.BatchNorm(n), tnn.ReLU()).half().eval()
        yield "torchsparse, nn.Sequential", lambda: row(x).feats
    with sparse_bridge.enable("minkowski", mode="standin"):
        me: Any = importlib.import_module("MinkowskiEngine")
        parts = me.MinkowskiConvolution(n, n, kernel_size=3, dimension=3), me.MinkowskiBatchNorm(n)
        d, e, f = (part.half().eval() for part in (*parts, me.MinkowskiReLU()))
        x = me.SparseTensor(features, coords)
        yield "MinkowskiEngine", lambda: f(e(d(x))).F


def _idiom(conv: Any, x: Any) -> Run:
    conv, norm, relu = conv.half().eval(), nn.BatchNorm1d(_CHANNELS).half().eval(), nn.ReLU()

    def run() -> Any:
        y = conv(x)
        return y.replace_feature(relu(norm(y.features))).features

    return run


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for how, worth in (("apart", 1 << 62), ("waiting", 0)):
        with torch.no_grad(), pretended_gpu(), mock.patch.object(convolution, "WORTH", [worth] * 2):
            for name, run in layers():
                least, median = times(run, rounds)
                print(f"{name}, {how}: {least:.1f} us, median {median:.1f}")


if __name__ == "__main__":
    main()
