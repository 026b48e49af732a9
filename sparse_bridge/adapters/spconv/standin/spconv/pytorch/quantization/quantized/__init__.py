"""Layers on quantised tensors."""

from spconv.pytorch.quantization.quantized.conv import LinearPerChannelWeight, SparseConv

__all__ = ["LinearPerChannelWeight", "SparseConv"]
