"""Fused layers on quantised tensors."""

from spconv.pytorch.quantization.quantized.conv import LinearPerChannelWeight, SparseConv
from torch.ao.nn.intrinsic.modules.fused import LinearReLU


class SparseConvReLU(SparseConv):
    """`SparseConv` with a ReLU."""

    def _finished(self, y):
        return y.relu()


class SparseConvAddReLU(SparseConvReLU):
    """`SparseConv`, a summand, and a ReLU."""


class LinearPerChannelWeightReLU(LinearPerChannelWeight):
    """`LinearPerChannelWeight` with a ReLU."""

    _FLOAT_MODULE = LinearReLU

    def _get_name(self):
        return "QuantizedLinearPerChannelWeightReLU"

    def _activated(self, y):
        return y.relu()

    @classmethod
    def from_reference(cls, ref_qlinear, output_scale, output_zero_point):
        """ref_qlinear: torch's reference layer, alone or fused with its ReLU."""
        linear = ref_qlinear[0] if isinstance(ref_qlinear, LinearReLU) else ref_qlinear
        return super().from_reference(linear, output_scale, output_zero_point)
