"""`flex_gemm.nn`: layers on plain tensors.

Submanifold layers take (feats, coords, shape, neighbor_cache=None) and give (feats, cache); the
others take output_coords, output_shape and neighbor_cache and give (feats, coords, shape, cache).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from ....core.traced import between_graphs
from ....core.traced.scripts import refuse_script
from ....errors import UnsupportedError
from ...call_stats import note
from ...channels import check_channels
from ..arguments import per_axis
from ..errors import ArgumentValueError
from . import convolutions, pools, resize
from .steps import replaced

__all__ = [
    "SparseConv",
    "SparseConvTranspose",
    "SparsePixelShuffle",
    "SparsePixelUnshuffle",
    "SparsePool",
    "SparseUpsample",
    "SubmanifoldConv",
    "SubmanifoldPool",
]

_PARAMETERS = ("weight", "bias")
_CHOICES = ("algorithm", "allow_tf32")  # of convolutions, where a layer has them


class _Spec(NamedTuple):
    """What a layer of one name runs: `function` with these attributes of the layer."""

    function: Callable[..., Any]
    attributes: tuple[str, ...]
    same_coordinates: bool = False


_LAYERS = {
    "SubmanifoldConv": _Spec(convolutions.submanifold_conv, (*_PARAMETERS, "dilation"), True),
    "SparseConv": _Spec(convolutions.sparse_conv, (*_PARAMETERS, "stride", "padding", "dilation")),
    "SparseConvTranspose": _Spec(convolutions.sparse_conv_transpose, (*_PARAMETERS, "stride", "padding", "dilation")),
    "SubmanifoldPool": _Spec(pools.submanifold_pool, ("kernel_size", "reduce"), True),
    "SparsePool": _Spec(pools.sparse_pool, ("kernel_size", "stride", "padding", "reduce")),
    "SparseUpsample": _Spec(resize.sparse_upsample, ("scale_factor", "mode", "padding_mode")),
    "SparsePixelShuffle": _Spec(resize.sparse_pixel_shuffle, ("upscale_factor",)),
    "SparsePixelUnshuffle": _Spec(resize.sparse_pixel_unshuffle, ("downscale_factor",)),
}


def forward_of(name: str, dimension: int | None, original: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`forward` of the layer of that name, for any object with its attributes.

    dimension: of the numbered forms, in which one integer stands for all axes.  original: FlexGEMM's own, which
    runs where a program has replaced a function that it goes through; None: UnsupportedError.
    """
    spec = _LAYERS[name]
    step = spec.function.__name__

    def attributes_of(layer: Any) -> dict[str, Any]:
        attributes = {"dimension": dimension}
        for attribute in spec.attributes:
            if not hasattr(layer, attribute):
                raise UnsupportedError(
                    f"{type(layer).__name__} has no attribute {attribute!r}, which the layers of "
                    "FlexGEMM 2.0 have; use mode='standin', profile='2.0'."
                )
            attributes[attribute] = getattr(layer, attribute)
        if "weight" in attributes:
            attributes.update({choice: getattr(layer, choice, None) for choice in _CHOICES})
        return attributes

    def elsewhere(layer: Any, function: str, *args: Any) -> Any:
        if original is None:
            raise UnsupportedError(
                f"{function} was replaced; {type(layer).__name__} of this stand-in does not call it. "
                "Override the layer's forward, or put the original function back."
            )
        note("flex_gemm", type(layer).__name__, f"{function} is replaced")
        return original(layer, *args)

    @between_graphs
    def submanifold(self: Any, feats: Any, coords: Any, shape: Any, neighbor_cache: Any = None) -> Any:
        function = replaced(step, dimension or getattr(type(self), "dimension", None))
        if function is not None:
            return elsewhere(self, function, feats, coords, shape, neighbor_cache)
        return spec.function(feats, coords, shape, neighbor_cache=neighbor_cache, **attributes_of(self))

    @between_graphs
    def forward(
        self: Any,
        feats: Any,
        coords: Any,
        shape: Any,
        output_coords: Any = None,
        output_shape: Any = None,
        neighbor_cache: Any = None,
    ) -> Any:
        function = replaced(step, dimension or getattr(type(self), "dimension", None))
        if function is not None:
            return elsewhere(self, function, feats, coords, shape, output_coords, output_shape, neighbor_cache)
        return spec.function(
            feats,
            coords,
            shape,
            output_coords=output_coords,
            output_shape=output_shape,
            neighbor_cache=neighbor_cache,
            **attributes_of(self),
        )

    return submanifold if spec.same_coordinates else forward


class _Layer(torch.nn.Module):
    """dimension: number of axes; None: of the tuple that is given."""

    dimension: ClassVar[int | None] = None
    _shown: tuple[str, ...] = ()
    __prepare_scriptable__ = refuse_script

    def _sizes(self, value: Any, name: str, like: Any = None) -> tuple[int, ...]:
        dimension = self.dimension if like is None else len(like)
        return per_axis(value, dimension, name, None if name == "padding" else 1)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)


class _Conv(_Layer):
    def _make(
        self, in_channels: int, out_channels: int, kernel_size: Any, bias: bool, algorithm: Any, allow_tf32: bool | None
    ) -> None:
        check_channels({"in_channels": in_channels, "out_channels": out_channels}, ArgumentValueError)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = self._sizes(kernel_size, "kernel_size")
        self.algorithm, self.allow_tf32 = algorithm, allow_tf32
        self.weight = torch.nn.Parameter(torch.empty(out_channels, *self.kernel_size, in_channels))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming-uniform with a = sqrt(5), as torch's own convolutions."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in = math.prod(self.weight.shape[1:])
            bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
            torch.nn.init.uniform_(self.bias, -bound, bound)


class SubmanifoldConv(_Conv):
    """Convolution whose outputs are its inputs' coordinates; see `ops.submanifold_conv`."""

    _shown = ("in_channels", "out_channels", "kernel_size", "dilation")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        dilation: Any = 1,
        bias: bool = True,
        algorithm: Any = None,
        allow_tf32: bool | None = None,
    ) -> None:
        super().__init__()
        self._make(in_channels, out_channels, kernel_size, bias, algorithm, allow_tf32)
        self.dilation = self._sizes(dilation, "dilation", self.kernel_size)


class SparseConv(_Conv):
    """Strided convolution; see `ops.sparse_conv`."""

    _shown = ("in_channels", "out_channels", "kernel_size", "stride", "dilation", "padding")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        padding: Any = 0,
        bias: bool = True,
        algorithm: Any = None,
        allow_tf32: bool | None = None,
    ) -> None:
        super().__init__()
        self._make(in_channels, out_channels, kernel_size, bias, algorithm, allow_tf32)
        self.stride = self._sizes(stride, "stride", self.kernel_size)
        self.dilation = self._sizes(dilation, "dilation", self.kernel_size)
        self.padding = self._sizes(padding, "padding", self.kernel_size)


class SparseConvTranspose(SparseConv):
    """Transposed convolution; see `ops.sparse_conv_transpose`."""


class SubmanifoldPool(_Layer):
    """Pool whose outputs are its inputs' coordinates; see `ops.submanifold_pool`."""

    _shown = ("kernel_size", "reduce")

    def __init__(self, kernel_size: Any, reduce: str = "mean") -> None:
        super().__init__()
        self.kernel_size, self.reduce = self._sizes(kernel_size, "kernel_size"), reduce


class SparsePool(_Layer):
    """Strided pool; see `ops.sparse_pool`."""

    _shown = ("kernel_size", "stride", "padding", "reduce")

    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0, reduce: str = "mean") -> None:
        super().__init__()
        self.kernel_size = self._sizes(kernel_size, "kernel_size")
        stride = self.kernel_size if stride is None else stride
        self.stride = self._sizes(stride, "stride", self.kernel_size)
        self.padding = self._sizes(padding, "padding", self.kernel_size)
        self.reduce = reduce


class SparseUpsample(_Layer):
    """Finer grid; see `ops.sparse_upsample`."""

    _shown = ("scale_factor", "mode", "padding_mode")

    def __init__(self, scale_factor: Any, mode: str = "nearest", padding_mode: str = "normalize") -> None:
        super().__init__()
        self.scale_factor = self._sizes(scale_factor, "scale_factor")
        self.mode, self.padding_mode = mode, padding_mode


class SparsePixelShuffle(_Layer):
    """Channels to space; see `ops.sparse_pixel_shuffle`."""

    _shown = ("upscale_factor",)

    def __init__(self, upscale_factor: Any) -> None:
        super().__init__()
        self.upscale_factor = self._sizes(upscale_factor, "upscale_factor")


class SparsePixelUnshuffle(_Layer):
    """Space to channels; see `ops.sparse_pixel_unshuffle`."""

    _shown = ("downscale_factor",)

    def __init__(self, downscale_factor: Any) -> None:
        super().__init__()
        self.downscale_factor = self._sizes(downscale_factor, "downscale_factor")


NAMES: dict[str, type[_Layer]] = {}
for _base in (
    SubmanifoldConv,
    SparseConv,
    SparseConvTranspose,
    SubmanifoldPool,
    SparsePool,
    SparseUpsample,
    SparsePixelShuffle,
    SparsePixelUnshuffle,
):
    _base.forward = forward_of(_base.__name__, None)  # type: ignore[method-assign]
    NAMES[_base.__name__] = _base
    for _n in (2, 3, 4):
        _name = f"{_base.__name__}{_n}d"
        NAMES[_name] = type(_name, (_base,), {"dimension": _n, "__doc__": _base.__doc__})
for _one in NAMES.values():
    _one.__module__ = "flex_gemm.nn"
