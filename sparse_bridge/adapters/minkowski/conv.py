"""Convolutions between the maps of a manager, on plain features."""

from __future__ import annotations

from typing import Any

import torch

from ...core.conv import convolution as core
from ...core.conv.depthwise import channelwise
from ...core.conv.epilogue import Epilogue
from ...core.conv.layers import convolve_layer
from ...core.conv.plan import ConvForm
from ...core.device import trace
from ...core.device.torch_compat import matmul_precision
from ...core.maps.kernel_map import KernelMap
from ...core.ops.pointwise import linear_layer
from ...errors import DataTypeError, DeviceError, ShapeError, SparseBridgeError
from .errors import FeatureShapeError, FeatureTypeError
from .geometry import KernelSpec, Region, folded
from .grid import Key, LayerMap
from .maps import MapRegistry
from .weights import check_features, check_weight

__all__ = ["channelwise_convolution", "collapsed", "convolve", "fold", "pointwise"]

_IEEE, _TF32 = ConvForm(), ConvForm(precision="tf32")


def convolve(
    features: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    kmap: KernelMap,
    layer_name: str,
    owner: Any = None,
) -> Any:
    """y[u] = sum of x[u + o * tensor stride] @ kernel[o] over a kernel map.

    owner: the layer, where what it returns may be deferred (`core.conv.deferred.conv`).
    features: [N, C_in].  kernel: [V, C_in, C_out] or [C_in, C_out].  bias: [1, C_out] or None.
    Raises: FeatureShapeError, FeatureTypeError, TensorDeviceError.
    """
    # fp32 products follow torch's own switch, see `weights.allow_tf32`.
    tf32 = features.dtype is torch.float32 and matmul_precision() == "tf32"
    epilogue = Epilogue(None if bias is None else bias.view(-1))
    try:
        if owner is not None:
            return convolve_layer(owner, features, kernel, kmap, epilogue, _TF32 if tf32 else _IEEE)
        return core.convolve(features, kernel, kmap, epilogue, _TF32 if tf32 else _IEEE)
    except (ShapeError, DataTypeError, DeviceError):
        # The engine has checked; said again as users of MinkowskiEngine know it.
        try:
            check_features(features, kmap.n_in, kmap.device, layer_name)
            check_weight(features, kernel, kernel.shape[-2], kmap.n_offsets, layer_name)
        except SparseBridgeError as said:
            raise said from None
        raise


def collapsed(registry: MapRegistry, in_key: Key, out_key: Key, kernel: torch.Tensor) -> tuple[torch.Tensor, KernelMap]:
    """The kernel and kernel map of a transposed layer whose offsets all read the output's own
    coordinate: what upstream computes for output coordinates given as a tensor, because it labels
    them with a tensor stride of 0."""
    centre = Region.of(((0,) * registry.dimension,))
    return kernel.sum(0, keepdim=True), registry.relation(out_key, in_key, centre).transposed()


def fold(registry: MapRegistry, key: Key, spec: KernelSpec, kernel: torch.Tensor) -> tuple[torch.Tensor, LayerMap]:
    """The kernel and map of a layer on a tensor stride of 0, where offsets coincide: their weights
    add up.  Raises: StrideError for any other layer (the one that `layer_map` has met)."""
    folded_spec, groups = folded(spec, registry.grid(key).stride)
    layer_map = registry.layer_map(key, folded_spec)
    shape = (len(folded_spec.region), *kernel.shape[1:])
    index = torch.tensor(groups, device=kernel.device)
    return kernel.new_zeros(shape).index_add(0, index, kernel), layer_map


def pointwise(
    features: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, layer_name: str, owner: Any
) -> Any:
    """Kernel volume 1 and stride 1: x @ kernel [C_in, C_out] + bias; follows autocast like torch.

    owner: as of `convolve`.
    Raises: FeatureShapeError, FeatureTypeError.
    """
    if features.ndim != 2:
        raise FeatureShapeError(f"{layer_name} got features of shape {list(features.shape)}.")
    if not features.is_floating_point():
        raise FeatureTypeError(f"{layer_name} got {features.dtype} features; use x.float().")
    check_weight(features, kernel, kernel.shape[0], 1, layer_name)
    trace.emit_linear("mm", features.shape[0], kernel.shape[0], kernel.shape[1])
    return linear_layer(owner, features, kernel, bias)


def channelwise_convolution(
    features: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, kmap: KernelMap, layer_name: str
) -> torch.Tensor:
    """Depthwise convolution: kernel [V, C], bias [1, C] or None.

    Raises: as `convolve`.
    """
    check_features(features, kmap.n_in, kmap.device, layer_name)
    check_weight(features, kernel, kernel.shape[1], kmap.n_offsets, layer_name)
    y = channelwise(features, kernel, kmap)
    return y if bias is None else y + bias.to(y.dtype)
