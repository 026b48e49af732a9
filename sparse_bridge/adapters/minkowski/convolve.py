"""Convolutions between the maps of a manager, on plain features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...core.conv.convolution import autocast_dtype, conv
from ...core.conv.depthwise import channelwise
from ...core.device import trace
from ...core.device.rocm import linear
from ...core.maps.kernel_map import KernelMap
from ..expected import Expected, of_kernel
from .errors import FeatureShapeError, FeatureTypeError
from .geometry import Region
from .layers import KernelSpec, check_features, output_key, transposed_key
from .registry import Key, MapRegistry
from .relations import relation

__all__ = [
    "channelwise_convolution", "convolution", "expected", "pointwise", "transposed_convolution",
]  # fmt: skip


def _check_weight(
    features: torch.Tensor, kernel: torch.Tensor, channels: int, taps: int, what: str
) -> None:
    if features.shape[1] != channels:
        raise FeatureShapeError(
            f"{what} takes {channels} channels, its input has {features.shape[1]}."
        )
    if kernel.ndim == 3 and kernel.shape[0] != taps:
        raise FeatureShapeError(
            f"{what} has a kernel of {kernel.shape[0]} taps for {taps} kernel offsets."
        )
    autocast = autocast_dtype(features.device)
    if features.dtype != kernel.dtype and (autocast is None or torch.float64 in (
        features.dtype, kernel.dtype
    )):  # fmt: skip
        raise FeatureTypeError(
            f"{what} has a {kernel.dtype} kernel, its input is {features.dtype}; "
            "convert one (x.float(), module.half()) or use torch.autocast."
        )


def _run(
    features: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, kmap: KernelMap
) -> torch.Tensor:
    flat = None if bias is None else bias.reshape(-1)
    return conv(features, kernel, flat, kmap, layout="vio", allow_tf32=_allow_tf32())


def _allow_tf32() -> bool:
    """fp32 products follow torch's own switch."""
    return torch.backends.cuda.matmul.allow_tf32


def expected(layer: Any) -> Iterator[Expected]:
    """What a convolution layer will ask the engine to multiply."""
    generator = layer.kernel_generator
    odd = all(size % 2 for size in generator.kernel_size)
    same = odd and not generator.requires_strided_coordinates
    return of_kernel(layer, same, _allow_tf32())


def convolution(
    registry: MapRegistry, features: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None,
    in_key: Key, given: Key | None, spec: KernelSpec, what: str = "MinkowskiConvolution",
) -> tuple[torch.Tensor, Key]:  # fmt: skip
    """y[u] = sum of x[u + o * tensor stride] @ kernel[o]: (features, key of the output).

    features: [N, C_in].  kernel: [V, C_in, C_out] or [C_in, C_out].  bias: [1, C_out] or None.
    given: an output map, None for the layer's own.
    Raises: FeatureShapeError, FeatureTypeError, TensorDeviceError, StrideError, KeyStateError.
    """
    check_features(registry, in_key, features, what)
    _check_weight(features, kernel, kernel.shape[-2], len(spec.region), what)
    out_key = output_key(registry, in_key, given, spec)
    kmap = relation(registry, in_key, out_key, spec.region)
    return _run(features, kernel, bias, kmap), out_key


def transposed_convolution(
    registry: MapRegistry, features: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None,
    in_key: Key, given: Key | None, spec: KernelSpec, what: str = "MinkowskiConvolutionTranspose",
    collapsed: bool = False,
) -> tuple[torch.Tensor, Key]:  # fmt: skip
    """The adjoint of `convolution` from the output's map to the input's; arguments are the same.

    collapsed: every kernel offset reads the output's own coordinate. That is what upstream computes
    for output coordinates given as a tensor, because it labels them with a tensor stride of 0.
    """
    check_features(registry, in_key, features, what)
    _check_weight(features, kernel, kernel.shape[-2], len(spec.region), what)
    out_key = transposed_key(registry, in_key, given, spec)
    region = spec.region
    if collapsed:
        kernel, region = kernel.sum(0, keepdim=True), Region.of(((0,) * registry.dimension,))
    kmap = relation(registry, out_key, in_key, region).transposed()
    return _run(features, kernel, bias, kmap), out_key


def pointwise(
    features: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, what: str
) -> torch.Tensor:
    """Kernel volume 1 and stride 1: x @ kernel [C_in, C_out] + bias; follows autocast like torch.

    Raises: FeatureShapeError, FeatureTypeError.
    """
    if features.ndim != 2:
        raise FeatureShapeError(f"{what} got features of shape {list(features.shape)}.")
    if not features.is_floating_point():
        raise FeatureTypeError(f"{what} got {features.dtype} features; use x.float().")
    _check_weight(features, kernel, kernel.shape[0], 1, what)
    trace.emit_linear("mm", features.shape[0], kernel.shape[0], kernel.shape[1])
    return linear(features, kernel, bias)


def channelwise_convolution(
    registry: MapRegistry, features: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None,
    in_key: Key, spec: KernelSpec,
) -> tuple[torch.Tensor, Key]:  # fmt: skip
    """Depthwise convolution: kernel [V, C], bias [1, C] or None.

    Raises: as `convolution`.
    """
    what = "MinkowskiChannelwiseConvolution"
    check_features(registry, in_key, features, what)
    _check_weight(features, kernel, kernel.shape[1], len(spec.region), what)
    out_key = output_key(registry, in_key, None, spec)
    y = channelwise(features, kernel, relation(registry, in_key, out_key, spec.region))
    return (y if bias is None else y + bias.to(y.dtype)), out_key
