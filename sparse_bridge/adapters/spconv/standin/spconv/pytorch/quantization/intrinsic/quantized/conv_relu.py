"""Fused layers on quantised tensors."""

from spconv.pytorch.quantization.quantized.conv import LinearPerChannelWeight
from spconv.pytorch.quantization.refused import refused_layer
from torch.ao.nn.intrinsic.modules.fused import LinearReLU

SparseConvReLU = refused_layer(__name__, "SparseConvReLU")
SparseConvAddReLU = refused_layer(__name__, "SparseConvAddReLU")


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
