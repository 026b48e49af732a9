"""Fused layers on quantised tensors."""

import torch
from spconv.pytorch.core import SparseConvTensor as SparseConvTensor
from spconv.pytorch.quantization import intrinsic
from spconv.pytorch.quantization.intrinsic.modules import SpconvAddReLUNd as SpconvAddReLUNd
from spconv.pytorch.quantization.intrinsic.modules import SpconvReLUNd as SpconvReLUNd
from spconv.pytorch.quantization.quantized.conv import LinearPerChannelWeight, SparseConv
from spconv.pytorch.quantization.utils import fuse_spconv_bn_weights as fuse_spconv_bn_weights
from torch.ao.nn.intrinsic.modules.fused import LinearReLU


class SparseConvReLU(SparseConv):
    """`SparseConv` with a ReLU."""

    _FLOAT_MODULE = intrinsic.SpconvReLUNd

    def _finished(self, y):
        return y.relu()


class SparseConvAddReLU(SparseConvReLU):
    """`SparseConv`, a summand, and a ReLU."""

    _FLOAT_MODULE = intrinsic.SpconvAddReLUNd

    def forward(self, input, add_input=None):
        return self._forward(input, add_input)


class LinearPerChannelWeightReLU(LinearPerChannelWeight):
    """`LinearPerChannelWeight` with a ReLU."""

    _FLOAT_MODULE = LinearReLU

    def __init__(self, in_features, out_features, bias=True, dtype=torch.qint8):
        super().__init__(in_features, out_features, bias, dtype)

    def _get_name(self):
        return "QuantizedLinearPerChannelWeightReLU"

    def _finished(self, y):
        return y.relu()

    @classmethod
    def from_reference(cls, ref_linear_relu, output_scale, output_zero_point):
        """ref_linear_relu: torch's reference layer, alone or fused with its ReLU."""
        return cls._from_reference(ref_linear_relu, output_scale, output_zero_point)
