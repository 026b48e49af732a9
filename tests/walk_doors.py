"""The walk of a layer of every framework, steady and cold: `python -m tests.walk_doors`.

Steady: inference of a submanifold layer whose map is known, on a GPU that is not there, whose
compiled kernels do nothing. Cold: its first call, on CPU tensors.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import sparse_bridge
from sparse_bridge import settings
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.kernels.gemm.gather_gemm import gather_gemm_kernel
from sparse_bridge.kernels.runtime import launch
from sparse_bridge.kernels.runtime import target as targets
from tests.clouds import cloud
from tests.walk import Walk, walk

__all__ = ["doors", "pretended_gpu"]

_HOPPER = targets.Target("cuda", "sm_90", 32, 132, 227 << 10, raw=True)


class _Compiled(dict):  # type: ignore[type-arg]
    def get(self, key: Any, default: Any = None) -> Any:
        return (lambda *args: None), (), ()


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """CPU tensors take the host's way of a GPU up to Triton's launcher, which does nothing."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch._C, "_cuda_getDevice", lambda: None),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
            (targets, "unavailable", lambda device: None),
            (targets, "of", lambda device: _HOPPER),
            (launch.Kernel, "launch", lambda self, *args: None),
            (gather_gemm_kernel, "_compiled", _Compiled()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(settings.override(dataflow="unmasked"))
        yield


def _layers() -> Iterator[tuple[str, Any, Any]]:
    """(framework, layer, input)."""
    coords, shape = cloud((6, 7, 5)), [6, 7, 5]
    features = torch.randn(len(coords), 16)
    with sparse_bridge.enable("spconv", mode="standin"):
        sp: Any = importlib.import_module("spconv.pytorch")
        layer = sp.SubMConv3d(16, 32, 3, indice_key="a").eval()
        yield "spconv", layer, sp.SparseConvTensor(features, coords, shape, 2)
    with sparse_bridge.enable("torchsparse", mode="standin"):
        ts: Any = importlib.import_module("torchsparse")
        conv: Any = importlib.import_module("torchsparse.nn").Conv3d
        yield "torchsparse", conv(16, 32, 3, bias=True).eval(), ts.SparseTensor(features, coords)
    with sparse_bridge.enable("minkowski", mode="standin"):
        me: Any = importlib.import_module("MinkowskiEngine")
        layer = me.MinkowskiConvolution(16, 32, kernel_size=3, dimension=3, bias=True).eval()
        yield "minkowski", layer, me.SparseTensor(features, coords)


def doors() -> Iterator[tuple[str, Walk, Walk]]:
    """(framework, steady, cold)."""
    for name, layer, x in _layers():
        with torch.no_grad():
            with settings.override(dataflow="per_offset"):
                made: list[Any] = []
                cold = walk(lambda layer=layer, x=x, made=made: made.append(layer(x)))
                if name == "spconv":  # whose maps travel with the tensors
                    x = made[0].replace_feature(x.features)
                for one in gc.get_objects():
                    if type(one) is Rulebook:
                        one.table(0)
            with pretended_gpu():
                for _ in range(2):
                    layer(x)
                yield name, walk(lambda layer=layer, x=x: layer(x)), cold


if __name__ == "__main__":
    for name, steady, cold in doors():
        last = steady.files.index("kernels/runtime/launch.py") + 1
        print(f"{name}: steady {last} files to the launcher, {len(steady.files)} in all,")
        print(f"  {steady.called} calls, entered twice: {steady.twice or 'none'}")
        print(f"  {' > '.join(steady.files)}")
        print(f"  cold {len(cold.files)} files, {cold.called} calls")
