"""Seams of an installed spconv: attributes looked up at call time, so live models keep classes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Proxy

from ...core.arguments import expect_tensors, refuse_arrays
from ...errors import UnsupportedError
from ..base import Patch
from ..call_stats import note
from ..steps import Steps
from . import pool as pools
from . import sums, tracing, weights
from .conv import conv_forward
from .dense import dense
from .keys import REUSE_CHECKS
from .norm import run_sequential
from .rules.switches import check_layout
from .tensors import add_in_place, assign_features, selected
from .upstream.patch_voxels import voxel_patches

_VERSIONS = ">=2.2,<2.4"


def _refusal(x: Any) -> str | None:
    """Why a call must run in spconv itself, decided before any work."""
    features = getattr(x, "_features", None)
    return None if features is None or features.dtype is not torch.qint8 else "int8 features"


def _convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    from spconv.pytorch.conv import SparseConvolution

    steps = Steps(SparseConvolution, "_conv_forward", original, but=REUSE_CHECKS)  # which `conv_forward` obeys

    @functools.wraps(original)
    def bridged(self: Any, training: bool, input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, Proxy):
            return tracing.as_node(self, input, input)
        reason = _refusal(input) or steps.refusal(self)
        if reason is None and kwargs.get("channel_scale") is not None:
            reason = "int8 scales"
        if reason is not None:
            note("spconv", type(self).__name__, reason)
            return original(self, training, input, *args, **kwargs)
        return conv_forward(self, training, input, *args, **kwargs)

    return bridged


def _pool(owner: type, forward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        steps = Steps(owner, "forward", original)

        @functools.wraps(original)
        def bridged(self: Any, input: Any) -> Any:
            if isinstance(input, Proxy):
                return tracing.as_node(self, input, input)
            reason = _refusal(input) or steps.refusal(self)
            if reason is not None:
                note("spconv", type(self).__name__, reason)
                return original(self, input)
            return forward(self, input)

        return bridged

    return factory


def _sequential(original: Callable[..., Any]) -> Callable[..., Any]:
    from spconv.pytorch import modules
    from spconv.pytorch.conv import SparseConvolution
    from spconv.pytorch.core import SparseConvTensor

    steps = Steps(modules.SparseSequential, "forward", original)
    convolution = SparseConvolution, Steps(SparseConvolution, "forward", also=("forward",))

    @functools.wraps(original)
    def bridged(self: Any, input: Any) -> Any:
        if _refusal(input) is not None or steps.overridden(self) is not None:
            return original(self, input)
        children = list(self._modules.values())
        return run_sequential(children, input, modules.is_spconv_module, SparseConvTensor, convolution)

    return bridged


def _dense(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bridged(self: Any, channels_first: bool = True) -> Any:
        if _refusal(self) is not None:
            return original(self, channels_first)
        return dense(self, channels_first)

    return bridged


def _any_volume(original: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of average pools, which refuses windows of more than 32 cells."""
    from spconv.pytorch.core import expand_nd

    @functools.wraps(original)
    def init(self: Any, ndim: int, kernel_size: Any = 3, stride: Any = 1, *args: Any, **kwargs: Any) -> None:
        original(self, ndim, 1, kernel_size if stride is None else stride, *args, **kwargs)
        self.kernel_size = expand_nd(ndim, kernel_size)

    return init


def _of_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(self: Any, features: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
        if type(features) is not torch.Tensor and not isinstance(features, Proxy):
            expect_tensors("SparseConvTensor", features=features)
        if type(indices) is not torch.Tensor and not isinstance(indices, Proxy):
            expect_tensors("SparseConvTensor", indices=indices)
        original(self, features, indices, *args, **kwargs)

    return init


def _of_a_tensor(argument: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Methods with one argument, whose errors say nothing of arrays."""

    def factory(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, value: Any) -> Any:
            refuse_arrays("SparseConvTensor", **{argument: value})
            return original(self, value)

        return method

    return factory


def _assignable(original: property) -> property:
    return property(original.fget, assign_features, None, "Features [N, C]; assignable as in spconv 1.x.")


def _before_loading(self: Any, state_dict: Any, prefix: str, *others: Any) -> None:
    weights.before_loading(self, state_dict, prefix, others[-1])


def patches() -> list[Patch]:
    """Patches for the spconv that is imported. Raises UnsupportedError outside 2.2 .. 2.3, and
    where its switches ask for weights of an older layout."""
    import spconv
    from spconv.pytorch import conv, core, functional, modules, pool

    check_layout(conv)
    release = tuple(int(part) for part in re.findall(r"\d+", spconv.__version__)[:2])
    if not (2, 2) <= release < (2, 4):
        raise UnsupportedError(
            f"spconv {spconv.__version__} is installed; the patches are written for {_VERSIONS}. "
            "Use enable('spconv', mode='standin') before importing spconv."
        )

    def seam(owner: Any, name: str, replacement: Any, reason: str, wraps: bool = True) -> Patch:
        return Patch(owner, name, replacement, reason, _VERSIONS, wraps)

    average = "averages divide by the active inputs on every device"
    unordered = "spconv's leaves kernel maps in the row order of the operand"
    compiled = "spconv's needs its compiled hash table"
    arrays = "spconv's errors do not say that an array is no tensor"
    assigned = "spconv 1.x code assigns features"
    twice = "spconv's permutes weights of older layouts twice"
    emptied = "spconv's empties the maps of the tensor, too"
    return [
        seam(conv.SparseConvolutionBase, "_conv_forward", _convolution, "all convolutions"),
        seam(modules.SparseSequential, "forward", _sequential, "fused layers"),
        *(
            seam(getattr(modules, name), "forward", tracing.one_node, "symbolic tracing")
            for name in ("SparseBatchNorm", "SparseSyncBatchNorm", "SparseReLU")
        ),
        *(
            seam(owner, "forward", _pool(owner, forward), why)
            for owner, forward, why in (
                (pool.SparseMaxPool, pools.max_pool_forward, "max pooling"),
                (pool.SparseAvgPool, pools.avg_pool_forward, average),
                (pool.SparseGlobalMaxOrAvgPool, pools.global_pool_forward, "all devices"),
            )
        ),
        seam(pool.SparseAvgPool, "__init__", _any_volume, average),
        *voxel_patches(seam),
        seam(functional, "sparse_add", sums.sparse_add, unordered, wraps=False),
        seam(functional, "sparse_add_hash_based", sums.sparse_add_hash_based, compiled, False),
        seam(core.SparseConvTensor, "features", _assignable(core.SparseConvTensor.features), assigned, wraps=False),
        seam(core.SparseConvTensor, "__init__", _of_tensors, arrays),
        seam(core.SparseConvTensor, "from_dense", _of_a_tensor("x"), arrays),
        seam(core.SparseConvTensor, "__add__", _of_a_tensor("other"), arrays),
        seam(core.SparseConvTensor, "dense", _dense, "rows outside of the grid are named"),
        seam(core.SparseConvTensor, "__iadd__", add_in_place, "spconv's raises", wraps=False),
        seam(core.SparseConvTensor, "select_by_index", selected, emptied, wraps=False),
        seam(conv.SparseConvolution, "_load_weight_different_layout", _before_loading, twice, wraps=False),
    ]
