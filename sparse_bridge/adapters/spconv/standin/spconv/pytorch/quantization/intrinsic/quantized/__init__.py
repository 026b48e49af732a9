"""Fused layers on quantised tensors."""

from spconv.pytorch.quantization.intrinsic.quantized.conv_relu import (
    LinearPerChannelWeightReLU,
    SparseConvAddReLU,
    SparseConvReLU,
)

__all__ = ["LinearPerChannelWeightReLU", "SparseConvAddReLU", "SparseConvReLU"]
