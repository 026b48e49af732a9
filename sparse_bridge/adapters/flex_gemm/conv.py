"""FlexGEMM's convolutions on plain tensors, behind the patches and the stand-in."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ...core.conv.convolution import convolve
from ...core.conv.epilogue import Epilogue
from ...core.conv.plan import ConvForm
from ...core.device.no_double_backward import no_double_backward
from ...core.maps import map_cache
from ...core.traced import between_graphs
from ..call_stats import note
from .arguments import check_operands, kernel_of
from .arguments import kernel_size as kernel_sizes
from .caches import map_of
from .errors import ArgumentShapeError
from .geometry import Strided, check_rows, triple
from .maps import output_coordinates, strided_cache, submanifold_cache
from .options import algorithm, form
from .warmup import tell

__all__ = ["SparseConv3dFunction", "SubMConv3dFunction", "sparse_conv3d", "sparse_submanifold_conv3d"]

_ONE = (1, 1, 1)
Optional = torch.Tensor | None
Gradients = tuple[Optional, Optional, Optional]


def multiply(
    feats: torch.Tensor, cache: Any, weight: torch.Tensor, bias: Optional, how: ConvForm, n_out: int | None = None
) -> torch.Tensor:
    """The product along a neighbour cache, with gradients, in the dtype of `feats`.  n_out: as of `map_of`.

    Autocast changes nothing, as in FlexGEMM, but where it made features of another dtype than the weight (an error
    there) the weight follows them."""
    n_offsets = math.prod(weight.shape[1:-1])
    kmap = map_of(cache, feats.shape[0], n_offsets, n_out)
    if torch._C._is_any_autocast_enabled():
        weight = weight.to(feats.dtype)
        with torch.autocast(feats.device.type, enabled=False):
            return convolve(feats, weight, kmap, Epilogue(bias), how)
    return convolve(feats, weight, kmap, Epilogue(bias), how)


def gradients(
    grad_output: torch.Tensor, feats: torch.Tensor, cache: Any, weight: torch.Tensor, bias: torch.Tensor | None
) -> Gradients:
    """Gradients of features, weight and bias, None for what needs none."""
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
        for tensor in (feats, weight, bias)
    ]
    inputs = [tensor for tensor in leaves if tensor is not None and tensor.requires_grad]
    if not inputs:
        return None, None, None
    with torch.enable_grad():
        y = multiply(leaves[0], cache, leaves[1], leaves[2], form())  # type: ignore[arg-type]
    grads = iter(torch.autograd.grad(y, inputs, grad_output))
    return tuple(next(grads) if tensor is not None and tensor.requires_grad else None for tensor in leaves)  # type: ignore[return-value]


class SubMConv3dFunction(torch.autograd.Function):
    """The autograd function of FlexGEMM: people call its parts and replace its `backward`.

    `sparse_submanifold_conv3d` goes through it only where a part was replaced.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        feats: Any,
        coords: Any,
        shape: Any,
        neighbor_cache: Any,
        weight: Any,
        bias: Any = None,
        dilation: Any = _ONE,
    ) -> Any:
        cls = SubMConv3dFunction
        algorithm()
        cache = _submanifold(feats, coords, shape, neighbor_cache, (weight, bias), dilation)
        out = cls._sparse_submanifold_conv_forward(feats, cache, weight, bias)
        ctx.save_for_backward(feats, weight, bias)
        ctx.neighbor_cache = cache
        return out, cache

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad_output: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        feats, weight, bias = ctx.saved_tensors
        grads = SubMConv3dFunction._sparse_submanifold_conv_backward(
            grad_output, feats, ctx.neighbor_cache, weight, bias
        )
        return grads[0], None, None, None, grads[1], grads[2], None

    @staticmethod
    @between_graphs
    def _compute_neighbor_cache(
        coords: torch.Tensor, shape: Sequence[int], kernel_size: Any, dilation: Any, needs_grad: bool = True
    ) -> Any:
        note("flex_gemm", "neighbor_cache")
        kernel: Any = kernel_sizes(kernel_size, 3)
        return submanifold_cache(coords, shape, kernel, triple(dilation, "dilation", 1), needs_grad)

    @staticmethod
    def _compute_neighbor_cache_torch(
        coords: torch.Tensor, shape: Sequence[int], kernel_size: Any, dilation: Any
    ) -> Any:
        _torch_variant()
        return SubMConv3dFunction._compute_neighbor_cache(coords, shape, kernel_size, dilation)

    @staticmethod
    @between_graphs
    def _sparse_submanifold_conv_forward(
        feats: torch.Tensor, neighbor_cache: Any, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_operands("the convolution", feats, weight, bias)
        with torch.no_grad():
            return multiply(feats, neighbor_cache, weight, bias, form())

    @staticmethod
    @between_graphs
    def _sparse_submanifold_conv_backward(
        grad_output: torch.Tensor,
        feats: torch.Tensor,
        neighbor_cache: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Gradients:
        return gradients(grad_output, feats, neighbor_cache, weight, bias)


class SparseConv3dFunction(torch.autograd.Function):
    """The autograd function of FlexGEMM's strided convolution, see `SubMConv3dFunction`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        feats: Any,
        coords: Any,
        shape: Any,
        neighbor_cache: Any,
        weight: Any,
        bias: Any = None,
        out_coords: Any = None,
        stride: Any = _ONE,
        padding: Any = (0, 0, 0),
        dilation: Any = _ONE,
    ) -> Any:
        algorithm()
        layer = Strided.of(kernel_of("sparse_conv3d", feats, weight, bias), stride, padding, dilation)
        out_coords, cache = _strided(feats, coords, shape, neighbor_cache, out_coords, (weight, bias), layer)
        out = SparseConv3dFunction._sparse_conv_forward(feats, cache, weight, bias)
        ctx.save_for_backward(feats, weight, bias)
        ctx.neighbor_cache = cache
        ctx.mark_non_differentiable(out_coords)
        return out, out_coords, cache

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        feats, weight, bias = ctx.saved_tensors
        grads = SparseConv3dFunction._sparse_conv_backward(grad_output, feats, ctx.neighbor_cache, weight, bias)
        return (grads[0], None, None, None, grads[1], grads[2], *(None,) * 4)

    @staticmethod
    @between_graphs
    def _get_output_coords(
        coords: torch.Tensor, shape: Sequence[int], kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> torch.Tensor:
        return output_coordinates(coords, shape, Strided.of(kernel_size, stride, padding, dilation))

    _get_output_coords_torch = _get_output_coords

    @staticmethod
    @between_graphs
    def _compute_neighbor_cache(
        coords: torch.Tensor,
        out_coords: torch.Tensor,
        shape: Sequence[int],
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        needs_grad: bool = True,
        is_out_coords_given: bool = False,
    ) -> Any:
        layer = Strided.of(kernel_size, stride, padding, dilation)
        return strided_cache(coords, out_coords, shape, layer, needs_grad)

    @staticmethod
    @functools.wraps(_compute_neighbor_cache, assigned=())  # the same arguments
    def _compute_neighbor_cache_torch(*args: Any, **keywords: Any) -> Any:
        _torch_variant()
        return SparseConv3dFunction._compute_neighbor_cache(*args, **keywords)

    # The products are the same ones, along a cache of either kind.
    _sparse_conv_forward = staticmethod(SubMConv3dFunction._sparse_submanifold_conv_forward)
    _sparse_conv_backward = staticmethod(SubMConv3dFunction._sparse_submanifold_conv_backward)


def _torch_variant() -> None:
    """Raises ArgumentShapeError, as FlexGEMM does, unless its algorithm is the explicit one."""
    if algorithm() != "explicit_gemm":
        raise ArgumentShapeError("the torch variant of the neighbour cache is for ALGORITHM = 'explicit_gemm'.")


def _submanifold(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Any,
    cache: Any,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    dilation: Any,
) -> Any:
    """The cache that was given, or one of these coordinates.  weights: weight and bias."""
    weight = weights[0]
    kernel = kernel_of("sparse_submanifold_conv3d", feats, *weights)
    needs = torch.is_grad_enabled() and (feats.requires_grad or weight.requires_grad)
    if cache is not None and not needs:
        return cache
    first = tell(feats, *weights, None)
    if cache is not None:
        return cache
    check_rows(feats, coords, "sparse_submanifold_conv3d")
    built = SubMConv3dFunction._compute_neighbor_cache(coords, shape, kernel, dilation, needs)
    del first
    return built


def _strided(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Any,
    cache: Any,
    out_coords: Any,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    layer: Strided,
) -> tuple[torch.Tensor, Any]:
    """(output coordinates, cache)."""
    check_rows(feats, coords, "sparse_conv3d")
    held = map_cache.store_of(coords)  # or its maps would go before the second one is asked for
    coords_out = SparseConv3dFunction._get_output_coords(coords, shape, *layer) if out_coords is None else out_coords
    first = cache is None
    if first:
        cache = SparseConv3dFunction._compute_neighbor_cache(coords, coords_out, shape, *layer)
    if first or (torch.is_grad_enabled() and (feats.requires_grad or weights[0].requires_grad)):
        tell(feats, *weights, coords_out.numel() // 4)
    del held
    return (coords_out if out_coords is None else coords_out.detach()), cache  # another tensor object, as upstream


_PARTS = [
    (function, name, function.__dict__[name])
    for function, names in (
        (SubMConv3dFunction, ("_sparse_submanifold_conv_forward", "_sparse_submanifold_conv_backward")),
        (SparseConv3dFunction, ("_sparse_conv_forward", "_sparse_conv_backward")),
    )
    for name in ("forward", "backward", *names)
]


def _as_made() -> bool:
    """Whether nobody replaced a part of the autograd functions."""
    return all(function.__dict__[name] is part for function, name, part in _PARTS)


def sparse_submanifold_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: Any = None,
    dilation: Any = _ONE,
    algorithm: Any = None,
) -> tuple[torch.Tensor, Any]:
    """Submanifold convolution; output rows are the input rows.

    Args:
        feats: [N, C_in], fp16, bf16, fp32 or fp64.  coords: int32 [N, 4] (batch, x, y, z).
        shape: (batch, channels, S1, S2, S3); rows outside meet no other row. None: the bounds of
            the coordinates.
        weight: [C_out, k1, k2, k3, C_in], odd kernel sizes.  bias: [C_out] or None.
        neighbor_cache: of an earlier call with these coordinates and this kernel; coords, shape and
            dilation are then not looked at.
        algorithm: a name of `ops.spconv.Algorithm`, checked; None: that of the module.

    Returns: ([N, C_out] in feats' dtype, the cache).
    Raises: ArgumentShapeError, ArgumentTypeError, ArgumentValueError, DataTypeError, DeviceError.
    """
    how = form(algorithm)
    if torch.compiler.is_compiling():
        from . import compiled

        layer = feats, coords, shape, weight, bias, neighbor_cache, dilation
        return compiled.submanifold_conv(sparse_submanifold_conv3d, _as_made, how, layer)
    if _as_made():
        cache = _submanifold(feats, coords, shape, neighbor_cache, (weight, bias), dilation)
        result: Any = multiply(feats, cache, weight, bias, how, feats.shape[0]), cache
    else:
        result = SubMConv3dFunction.apply(feats, coords, shape, neighbor_cache, weight, bias, dilation)
    note("flex_gemm", "sparse_submanifold_conv3d")
    return result  # type: ignore[no-any-return]


def sparse_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: Any = None,
    out_coords: Any = None,
    stride: Any = _ONE,
    padding: Any = (0, 0, 0),
    dilation: Any = _ONE,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Strided convolution: out[q] = sum of W[t] feats[q * stride - padding + t * dilation].

    Args:
        as `sparse_submanifold_conv3d`, any kernel size; and
        out_coords: int32 [M, 4], taken as they are; None: every cell of the output grid with an
            input, ascending.

    Returns: ([M, C_out], output coordinates int32 [M, 4], the cache).
    Raises: as `sparse_submanifold_conv3d`.
    """
    how = form()
    layer = Strided.of(kernel_of("sparse_conv3d", feats, weight, bias), stride, padding, dilation)
    if torch.compiler.is_compiling():
        from . import compiled

        arguments = feats, coords, shape, weight, bias, neighbor_cache, out_coords
        return compiled.strided_conv(sparse_conv3d, _as_made, how, layer, arguments)
    if _as_made():
        coords_out, cache = _strided(feats, coords, shape, neighbor_cache, out_coords, (weight, bias), layer)
        y = multiply(feats, cache, weight, bias, how, coords_out.shape[0])
    else:
        y, coords_out, cache = SparseConv3dFunction.apply(
            feats, coords, shape, neighbor_cache, weight, bias, out_coords, *layer[1:]
        )
    note("flex_gemm", "sparse_conv3d")
    return y, coords_out, cache
