"""Depthwise convolution."""

import math

import torch
from MinkowskiEngine.MinkowskiKernelGenerator import KernelLayer, generator_of
from MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, refuse_input
from torch.nn import Parameter

from sparse_bridge.adapters.call_stats import note
from sparse_bridge.adapters.channels import check_channels
from sparse_bridge.adapters.minkowski.conv import channelwise_convolution
from sparse_bridge.adapters.minkowski.upstream.arguments import arguments_of_0_4

__all__ = ["MinkowskiChannelwiseConvolution"]


class MinkowskiChannelwiseConvolution(KernelLayer):
    """Every channel convolved by itself: `kernel` [V, C], `bias` [1, C].

    Args: as MinkowskiConvolution, with one number of channels.
    Raises: ContractError (an AssertionError).
    """

    use_mm = False  # of 0.4: whether it is a matrix product

    @arguments_of_0_4("in_channels kernel_size stride dilation has_bias=bias kernel_generator dimension")
    def __init__(
        self, in_channels, kernel_size=-1, stride=1, dilation=1, bias=False, kernel_generator=None, dimension=-1
    ):
        super().__init__()
        check_channels({"in_channels": in_channels})
        kernel_generator = generator_of(kernel_generator, kernel_size, stride, dilation, dimension)
        self.in_channels = in_channels
        self.kernel_generator = kernel_generator
        self.dimension = dimension
        self.kernel_shape = (kernel_generator.kernel_volume, in_channels)
        self.kernel = Parameter(torch.empty(self.kernel_shape))
        self.bias = Parameter(torch.empty(1, in_channels)) if bias else None
        self.reset_parameters()

    @property
    def has_bias(self):
        """0.4's attribute."""
        return self.bias is not None

    def reset_parameters(self, is_transpose=False):
        """Uniform in +-1 / sqrt(channels * volume), transposed or not: as many go in as out."""
        with torch.no_grad():
            bound = 1 / math.sqrt(self.in_channels * self.kernel_generator.kernel_volume)
            self.kernel.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def forward(self, input, coords=None):
        """SparseTensor -> SparseTensor; `coords` is ignored, as upstream.

        Raises: ContractError, FeatureShapeError, FeatureTypeError, StrideError, TensorDeviceError.
        """
        if not isinstance(input, SparseTensor) or self.dimension != input._D:
            refuse_input(self, input)
        layer_name, manager = type(self).__name__, input._manager
        in_key = input.coordinate_map_key.key
        key, kmap = manager._manager.layer_map(in_key, self.kernel_generator.spec(False, in_key))
        out = channelwise_convolution(input._F, self.kernel, self.bias, kmap, layer_name)
        note("minkowski", layer_name)
        return SparseTensor._of(out, key, manager)

    def __repr__(self):
        generator = self.kernel_generator
        return f"{self.__class__.__name__}(in={self.in_channels}, {generator.summary()})"
