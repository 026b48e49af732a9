"""Depthwise convolution."""

import math

import torch
from MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from MinkowskiEngine.MinkowskiKernelGenerator import generator_of
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from MinkowskiEngineBackend._C import CoordinateMapKey
from torch.nn import Parameter

from sparse_bridge.adapters.ledger import note
from sparse_bridge.adapters.minkowski.arguments import drop_old
from sparse_bridge.adapters.minkowski.convolve import channelwise_convolution
from sparse_bridge.errors import ContractError

__all__ = ["MinkowskiChannelwiseConvolution"]


class MinkowskiChannelwiseConvolution(MinkowskiModuleBase):
    """Every channel convolved by itself: `kernel` [V, C], `bias` [1, C].

    Args: as MinkowskiConvolution, with one number of channels.
    Raises: ContractError (an AssertionError).
    """

    def __init__(
        self, in_channels, kernel_size=-1, stride=1, dilation=1, bias=False, kernel_generator=None,
        dimension=-1, **old,
    ):  # fmt: skip
        super().__init__()
        bias = old.pop("has_bias", bias)
        drop_old(type(self).__name__, old, ())
        kernel_generator = generator_of(kernel_generator, kernel_size, stride, dilation, dimension)
        self.in_channels = in_channels
        self.kernel_generator = kernel_generator
        self.dimension = dimension
        self.kernel = Parameter(torch.empty(kernel_generator.kernel_volume, in_channels))
        self.bias = Parameter(torch.empty(1, in_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        """Uniform in +-1 / sqrt(channels * volume)."""
        with torch.no_grad():
            bound = 1 / math.sqrt(self.in_channels * self.kernel_generator.kernel_volume)
            self.kernel.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def forward(self, input, coords=None):
        """SparseTensor -> SparseTensor; `coords` is ignored, as upstream.

        Raises: ContractError, FeatureShapeError, FeatureTypeError, StrideError, TensorDeviceError.
        """
        if not isinstance(input, SparseTensor):
            raise ContractError(
                f"MinkowskiChannelwiseConvolution takes a SparseTensor, got {type(input).__name__}."
            )
        if self.dimension != input.D:
            raise ContractError(
                f"the layer has dimension {self.dimension}, its input has D={input.D}."
            )
        out, key = channelwise_convolution(
            input._manager._manager, input.F, self.kernel, self.bias, input.coordinate_map_key.key,
            self.kernel_generator.spec(),
        )  # fmt: skip
        note("minkowski", type(self).__name__)
        return SparseTensor(
            out, coordinate_map_key=CoordinateMapKey.of(key), coordinate_manager=input._manager
        )

    def __repr__(self):
        generator = self.kernel_generator
        text = f"{self.__class__.__name__}(in={self.in_channels}, "
        if generator.region_type.name == "CUSTOM":
            text += f"region_type={generator.region_type}, "
            text += f"kernel_volume={generator.kernel_volume}, "
        else:
            text += f"kernel_size={generator.kernel_size}, "
        return text + f"stride={generator.kernel_stride}, dilation={generator.kernel_dilation})"
