"""Features and weights of a layer: what they must be, and what will be multiplied by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...core.conv.convolution import autocast_dtype
from ...core.device.torch_compat import allows_tf32
from ..warmup_registry import Expected, new_coordinates, of_kernel
from .errors import FeatureShapeError, FeatureTypeError, TensorDeviceError
from .grid import Grid


def check_features(features: torch.Tensor, n_rows: int, device: torch.device, layer_name: str) -> None:
    """Features [n_rows, C] must be floating point, on the device of their coordinates.

    Raises: FeatureShapeError, FeatureTypeError, TensorDeviceError.
    """
    if features.ndim != 2 or features.shape[0] != n_rows:
        raise FeatureShapeError(
            f"{layer_name} got features of shape {list(features.shape)} for a coordinate map of "
            f"{n_rows} rows; expected [{n_rows}, C]."
        )
    if not features.is_floating_point():
        raise FeatureTypeError(f"{layer_name} got {features.dtype} features; it takes floating point (use x.float()).")
    if features.device != device:
        raise TensorDeviceError(
            f"{layer_name} got features on {features.device}, its coordinates are on {device}; "
            "build the tensor with device=."
        )


def check_aligned(features: torch.Tensor, grid: Grid, layer_name: str) -> None:
    """`check_features` for the rows of a map."""
    check_features(features, grid.n_rows, grid.device, layer_name)


def check_weight(features: torch.Tensor, kernel: torch.Tensor, channels: int, n_offsets: int, layer_name: str) -> None:
    """Features [N, channels] and a kernel of `n_offsets` matrices must be of one dtype.

    Raises: FeatureShapeError, FeatureTypeError.
    """
    if features.shape[1] != channels:
        raise FeatureShapeError(f"{layer_name} takes {channels} channels, its input has {features.shape[1]}.")
    if kernel.ndim == 3 and kernel.shape[0] != n_offsets:
        raise FeatureShapeError(
            f"{layer_name} has a kernel of {kernel.shape[0]} matrices for {n_offsets} kernel offsets."
        )
    autocast = autocast_dtype(features.device)
    if features.dtype != kernel.dtype and (autocast is None or torch.float64 in (features.dtype, kernel.dtype)):
        raise FeatureTypeError(
            f"{layer_name} has a {kernel.dtype} kernel, its input is {features.dtype}; "
            "convert one (x.float(), module.half()) or use torch.autocast."
        )


def allow_tf32() -> bool:
    """fp32 products follow torch's own switch."""
    return allows_tf32()


def expected(layer: Any) -> Iterator[Expected]:
    """What a convolution layer will ask the engine to multiply."""
    generator = layer.kernel_generator
    odd = all(size % 2 for size in generator.kernel_size)
    new, strided = generator.requires_strided_coordinates, None
    if new and not layer.is_transpose:
        strided = new_coordinates(generator.kernel_size, generator.kernel_stride)
    return of_kernel(layer, odd and not new, allow_tf32(), strided, layer.is_transpose)
