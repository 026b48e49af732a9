"""Layers on quantised tensors."""

import torch
from spconv.pytorch.quantization.refused import refused_layer
from torch import nn
from torch.ao.nn.quantized.modules.utils import WeightedQuantizedModule

SparseConv = refused_layer(__name__, "SparseConv")


class LinearPerChannelWeight(WeightedQuantizedModule):
    """A linear layer from int8 to int8 values with one weight scale per output channel, in float.

    (torch's own takes no signed activations.)
    """

    _FLOAT_MODULE = nn.Linear

    def __init__(self, in_features, out_features, bias_=True, dtype=torch.qint8):
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        ones = torch.ones(out_features, dtype=torch.float64)
        weight = torch.quantize_per_channel(
            torch.zeros(out_features, in_features), ones, torch.zeros_like(ones).long(), 0, dtype
        )
        self.register_buffer("_weight", weight)
        self.register_buffer("_bias", torch.zeros(out_features) if bias_ else None)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.long))

    def _get_name(self):
        return "QuantizedLinearPerChannelWeight"

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"scale={float(self.scale)}, zero_point={int(self.zero_point)}"
        )

    def weight(self):
        return self._weight

    def bias(self):
        return self._bias

    def set_weight_bias(self, w, b):
        self._weight, self._bias = w, b

    def _activated(self, y):
        return y

    def forward(self, x):
        y = nn.functional.linear(x.dequantize(), self._weight.dequantize(), self._bias)
        return torch.quantize_per_tensor(
            self._activated(y), self.scale, self.zero_point, self.dtype
        )

    @classmethod
    def from_reference(cls, ref_qlinear, output_scale, output_zero_point):
        """ref_qlinear: torch's reference layer, with the scales of its weight."""
        made = cls(ref_qlinear.in_features, ref_qlinear.out_features, ref_qlinear.bias is not None)
        bias = None if ref_qlinear.bias is None else ref_qlinear.bias.detach()
        made.set_weight_bias(ref_qlinear.get_quantized_weight(), bias)
        made.scale = torch.as_tensor(output_scale, dtype=torch.float32).clone()
        made.zero_point = torch.as_tensor(output_zero_point, dtype=torch.long).clone()
        return made
