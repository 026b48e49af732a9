"""Layers on quantised tensors."""

import torch
from spconv.pytorch.core import SparseConvTensor
from spconv.pytorch.quantization.core import quantize_per_tensor
from spconv.pytorch.quantization.quantized.reference import SpConv
from spconv.pytorch.quantization.utils import constructor_arguments
from torch import nn
from torch.ao.nn.quantized.modules.utils import WeightedQuantizedModule

from sparse_bridge.errors import UnsupportedError


def dequantized(x):
    """A sparse tensor with the values of its features, quantised or not."""
    return x.dequantize() if isinstance(x, SparseConvTensor) and x.is_quantized else x


class SparseConv(SpConv):
    """A convolution from int8 to int8 values with the weight's scales, in float.

    Made of a reference layer; scale, zero_point: of the output.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        del self.scale, self.zero_point  # plain numbers of every convolution
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.long))

    def _get_name(self):
        return f"Quantized{type(self).__name__}"

    def _finished(self, y):
        return y

    def forward(self, x, add_input=None):
        y = super().forward(dequantized(x))
        if add_input is not None:
            y = y.replace_feature(y.features + dequantized(add_input).features)
        y = y.replace_feature(self._finished(y.features))
        return quantize_per_tensor(y, self.scale, self.zero_point, torch.qint8)

    @classmethod
    def from_float(cls, *args, **kwargs):
        raise UnsupportedError(
            f"{cls.__name__} is made of a reference layer, by torch's convert_fx; there is no way "
            "from eager mode."
        )

    @classmethod
    def from_reference(cls, ref_qconv, output_scale, output_zero_point):
        """ref_qconv: an `SpConv`, alone or fused with its ReLU."""
        conv = ref_qconv if isinstance(ref_qconv, SpConv) else ref_qconv[0]
        made = cls(
            **constructor_arguments(conv), device=conv.weight.device, dtype=conv.weight.dtype,
            weight_qparams=conv.weight_qparams(),
        )  # fmt: skip
        made.weight, made.bias = conv.weight, conv.bias
        made.scale = torch.as_tensor(output_scale, dtype=torch.float32).clone()
        made.zero_point = torch.as_tensor(output_zero_point, dtype=torch.long).clone()
        return made.train(conv.training)


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
