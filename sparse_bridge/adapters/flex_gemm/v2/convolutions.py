"""Convolutions of 2.0 on plain tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ....core.conv.convolution import convolve
from ....core.conv.epilogue import Epilogue
from ....core.traced import between_graphs
from ...call_stats import note
from ..arguments import check_operands, check_tensors
from ..errors import ArgumentShapeError, ArgumentValueError
from ..options import form
from . import cache as caches
from .cache import NeighborCache, Outputs
from .windows import Window, box_window, centred_window, delta_window

LayerOutput = tuple[torch.Tensor, torch.Tensor, torch.Size, NeighborCache]

__all__ = ["sparse_conv", "sparse_conv_transpose", "submanifold_conv"]


@between_graphs
def submanifold_conv(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dilation: Any = 1,
    kernel_delta: Any = None,
    neighbor_cache: Any = None,
    algorithm: Any = None,
    allow_tf32: bool | None = None,
    dimension: int | None = None,
) -> tuple[torch.Tensor, NeighborCache]:
    """out[n] = bias + sum of W[t] feats at coord_n + (t - (k - 1) // 2) * dilation.

    Args:
        feats: [N, C_in].  coords: int32 [N, batch columns + D].
        shape: (batch sizes, S1 .. SD, C), C is not looked at; None: the bounds of the coordinates.
        weight: [C_out, k1 .. kD, C_in]; with `kernel_delta` [V, D] it is [C_out, V, C_in].
        neighbor_cache: of an earlier call with these coordinates and this kernel.
        algorithm: checked, without effect.  allow_tf32: of fp32 products; None: the switch.

    Returns: ([N, C_out] in feats' dtype, under autocast in its dtype; the cache).
    Raises: ArgumentShapeError, ArgumentTypeError, ArgumentValueError, DataTypeError, DeviceError.
    """
    caller = "submanifold_conv"
    kernel = _kernel(caller, weight, kernel_delta, dimension)
    window = centred_window(kernel, dilation) if kernel_delta is None else kernel
    cache = caches.around(caller, coords, shape, window, neighbor_cache)
    return _product(caller, (feats, weight, bias), cache, (algorithm, allow_tf32)), cache


@between_graphs
def sparse_conv(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    kernel_delta: Any = None,
    offset: Any = 0,
    output_coords: torch.Tensor | None = None,
    output_shape: Sequence[int] | None = None,
    neighbor_cache: Any = None,
    algorithm: Any = None,
    allow_tf32: bool | None = None,
    dimension: int | None = None,
) -> LayerOutput:
    """out[q] = bias + sum of W[t] feats at q * stride - padding + t * dilation.

    Args:
        as `submanifold_conv`, a shape is needed; with `kernel_delta` the window reads q * stride +
            offset + delta.
        output_coords: int32 [M, batch columns + D], taken as they are; None: every cell of the
            output grid with an input, ascending.
        output_shape: (batch sizes, extents, C), C is not looked at; None: by the formula.

    Returns: ([M, C_out], output coordinates, output shape, the cache).
    Raises: as `submanifold_conv`.
    """
    kernel = _kernel("sparse_conv", weight, kernel_delta, dimension)
    window = _strided(kernel, stride, padding, dilation, offset)
    out = Outputs(output_coords, output_shape, neighbor_cache)
    cache = caches.down("sparse_conv", coords, shape, window, out)
    y = _product("sparse_conv", (feats, weight, bias), cache, (algorithm, allow_tf32))
    return y, cache.output_coords, cache.shape(y.shape[1]), cache


@between_graphs
def sparse_conv_transpose(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    kernel_delta: Any = None,
    offset: Any = 0,
    output_coords: torch.Tensor | None = None,
    output_shape: Sequence[int] | None = None,
    neighbor_cache: Any = None,
    algorithm: Any = None,
    allow_tf32: bool | None = None,
    dimension: int | None = None,
) -> LayerOutput:
    """out[p * stride - padding + t * dilation] = bias + sum of W[t] feats at p.

    Arguments and results as in `sparse_conv`; a cache must be transposed (`cache.T` of that of the
    way down, or one that this function returned).
    """
    kernel = _kernel("sparse_conv_transpose", weight, kernel_delta, dimension)
    window = _strided(kernel, stride, padding, dilation, offset)
    out = Outputs(output_coords, output_shape, neighbor_cache)
    cache = caches.up("sparse_conv_transpose", coords, shape, window, out, strict=True)
    y = _product("sparse_conv_transpose", (feats, weight, bias), cache, (algorithm, allow_tf32))
    return y, cache.output_coords, cache.shape(y.shape[1]), cache


def _kernel(caller: str, weight: torch.Tensor, kernel_delta: Any, dimension: int | None) -> Any:
    """The weight's kernel size; with `kernel_delta` the window of those offsets, of stride 1.

    Raises: ArgumentTypeError, ArgumentValueError.
    """
    check_tensors(caller, weight=weight)
    axes = 1 if kernel_delta is not None else dimension
    if weight.ndim < 3 or (axes is not None and weight.ndim != axes + 2):
        axes_layout = "V" if kernel_delta is not None else f"k1 .. k{dimension or 'D'}"
        raise ArgumentValueError(
            f"{caller} got a weight of shape {list(weight.shape)}; expected [C_out, {axes_layout}, C_in]."
        )
    if kernel_delta is None:
        return tuple(weight.shape[1:-1])
    window = delta_window(kernel_delta)
    if len(window.offsets) != weight.shape[1] or dimension not in (None, window.dimension):
        raise ArgumentValueError(
            f"{caller} got {len(window.offsets)} kernel offsets of {window.dimension} axes for a "
            f"weight of shape {list(weight.shape)}."
        )
    return window


def _strided(kernel: Any, stride: Any, padding: Any, dilation: Any, offset: Any) -> Window:
    if isinstance(kernel, Window):
        return delta_window(kernel.offsets, stride, offset)
    return box_window(kernel, stride, padding, dilation)


def _product(
    caller: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    cache: NeighborCache,
    options: tuple[Any, bool | None],
) -> torch.Tensor:
    """tensors: features, weight, bias.  options: algorithm, allow_tf32."""
    feats, weight, bias = tensors
    check_operands(caller, feats, weight, bias)
    if feats.ndim != 2 or feats.shape[1] != weight.shape[-1]:
        raise ArgumentShapeError(
            f"{caller} got features of shape {list(feats.shape)}; expected [N, {weight.shape[-1]}]."
        )
    kmap = cache.kernel_map(feats, math.prod(weight.shape[1:-1]))
    y = convolve(feats, weight, kmap, Epilogue(bias), form(options[0], _tf32(options[1])))
    note("flex_gemm", caller)
    return y


def _tf32(requested: bool | None) -> bool | None:
    """What the call says, or `flex_gemm.config.SPCONV_ALLOW_TF32`."""
    if requested is not None:
        return requested
    return getattr(sys.modules.get("flex_gemm.config"), "SPCONV_ALLOW_TF32", None)
