"""The walk of a layer of every framework, steady and cold: `python -m tests.walk_apis`.

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
from sparse_bridge.adapters.torchsparse import conv as torchsparse_conv
from sparse_bridge.core.conv import convolution
from sparse_bridge.core.maps.rulebook import Rulebook
from sparse_bridge.kernels.gemm.gather_kernels import gather_gemm_kernel, sum_partials_kernel
from sparse_bridge.kernels.gemm.narrow_gemm import narrow_gemm_kernel
from sparse_bridge.kernels.gemm.wgrad_gemm import sum_shares_kernel, wgrad_kernel
from sparse_bridge.kernels.ops import batch_norm, batch_norm_grad
from tests.adapters.spconv import apis as spconv_apis
from tests.clouds import cloud
from tests.fake_driver import entry_of
from tests.fake_gpu import HOPPER, FakeGpu, fake_gpu
from tests.rules import layers_deferred
from tests.walk import Walk, walk

__all__ = ["LAUNCHER", "pretended_gpu", "walks"]

# Where Triton's launcher is called.
LAUNCHER = "kernels/runtime/launch.py", "begin"

_KERNELS = (
    gather_gemm_kernel,
    narrow_gemm_kernel,
    sum_partials_kernel,
    wgrad_kernel,
    sum_shares_kernel,
    batch_norm.partials_kernel,
    batch_norm.apply_kernel,
    batch_norm_grad.grad_partials_kernel,
    batch_norm_grad.dx_kernel,
)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[FakeGpu]:
    """CPU tensors take the host's way of a GPU up to Triton's launcher, which does nothing."""
    facts = {"raw": None, "target": HOPPER, "launches": lambda kernel, *args: None}
    facts["compiled"] = {kernel: entry_of(kernel) for kernel in _KERNELS}
    as_on_a_gpu = layers_deferred(convolution.MIN_DEFERRED_ELEMENTS[1])
    with as_on_a_gpu, fake_gpu(**facts) as gpu, settings.override(dataflow="masked"):
        yield gpu


def _layers() -> Iterator[tuple[str, Any, Any]]:
    """(framework, layer, input)."""
    coords, shape = cloud((40, 40, 40)), [40, 40, 40]
    features = torch.randn(len(coords), 16)
    with spconv_apis.standin() as sp:
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
    with sparse_bridge.enable("flex_gemm", mode="standin"):
        fg: Any = importlib.import_module("flex_gemm.ops.spconv")
        weight, bias, grid = torch.randn(32, 3, 3, 3, 16), torch.rand(32), (2, 16, *shape)

        def function(cache: Any) -> Any:
            return fg.sparse_submanifold_conv3d(features, coords, grid, weight, bias, cache)[1]

        yield "flex_gemm", function, None


def _rulebooks() -> list[Rulebook]:
    """All that there are."""
    return [one for one in gc.get_objects() if type(one) is Rulebook]


def walks() -> Iterator[tuple[str, Walk, Walk]]:
    """(framework, steady, cold)."""
    for name, layer, x in _layers():
        with torch.no_grad():
            with settings.override(dataflow="per_offset"):
                made: list[Any] = []
                others = _rulebooks()
                cold = walk(lambda layer=layer, x=x, made=made: made.append(layer(x)))
                if name == "spconv":  # whose maps travel with the tensors
                    x = made[0].replace_feature(x.features)
                elif name == "flex_gemm":  # whose maps the caller hands over
                    x = made[0]
                for one in _rulebooks():
                    if one.order is None and not any(one is other for other in others):
                        one.table(0)
            # Python's walk; and what no tensor of a GPU is asked.
            unasked = mock.patch.object(torchsparse_conv, "as_on_gpu", lambda device: False)
            with pretended_gpu(), settings.override(native=False), unasked:
                for _ in range(6):  # until it is known that nothing follows
                    layer(x)
                yield name, walk(lambda layer=layer, x=x: layer(x)), cold


if __name__ == "__main__":
    for name, steady, cold in walks():
        way = steady.until(*LAUNCHER)
        print(f"{name}: steady {len(way.files)} files to the launcher, {way.called} calls,")
        print(f"  entered twice: {way.twice or 'none'}; over 6 arguments: {way.wide(6) or 'none'}")
        print(f"  {' > '.join(way.files)}")
        print(f"  with the result {len(steady.files)} files, {steady.called} calls, entered twice:")
        print(f"  {steady.twice or 'none'}; cold {len(cold.files)} files, {cold.called} calls")
