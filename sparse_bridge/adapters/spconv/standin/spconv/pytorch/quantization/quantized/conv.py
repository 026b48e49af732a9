"""Layers on quantised tensors."""

import torch
from spconv.core import ConvAlgo as ConvAlgo
from spconv.pytorch.conv import SparseConvolution, SparseConvolutionBase
from spconv.pytorch.core import SparseConvTensor
from spconv.pytorch.modules import SparseModule
from spconv.pytorch.quantization.core import quantize_per_tensor
from spconv.pytorch.quantization.utils import constructor_arguments
from spconv.pytorch.quantization.utils import fuse_spconv_bn_eval as fuse_spconv_bn_eval
from spconv.pytorch.quantization.utils import fuse_spconv_bn_weights as fuse_spconv_bn_weights
from torch import nn
from torch.ao.nn.quantized.modules.utils import WeightedQuantizedModule, _quantize_weight

from sparse_bridge.adapters.spconv.conv import layer_forward
from sparse_bridge.adapters.spconv.upstream.constructors import takes
from sparse_bridge.errors import ContractError


def dequantized(x):
    """A sparse tensor with the values of its features, quantised or not."""
    return x.dequantize() if isinstance(x, SparseConvTensor) and x.is_quantized else x


class _Quantised(WeightedQuantizedModule):
    """A layer from int8 to int8 values, in float: an int8 weight with a scale per output channel, a
    bias, and the scale and zero point of the output."""

    def _hold(self, weight_shape, bias, device=None, dtype=torch.qint8):
        zeros = torch.zeros(weight_shape, device=device)
        ones = torch.ones(weight_shape[0], dtype=torch.float64, device=device)
        weight = torch.quantize_per_channel(zeros, ones, torch.zeros_like(ones).long(), 0, dtype)
        self.register_buffer("_weight", weight)
        self.register_buffer("_bias", torch.zeros_like(ones, dtype=torch.float) if bias else None)
        self.register_buffer("scale", torch.ones((), device=device))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.long, device=device))

    def weight(self):
        return self._weight

    def bias(self):
        return self._bias

    def set_weight_bias(self, w, b):
        self._weight, self._bias = w, b

    def _finished(self, y):
        return y

    @classmethod
    def _quantized(cls, layer, weight, scale, zero_point):
        quantized = cls._like(layer)
        quantized.set_weight_bias(weight.detach(), None if layer.bias is None else layer.bias.detach())
        quantized.scale = torch.as_tensor(scale, dtype=torch.float32).reshape(()).clone()
        quantized.zero_point = torch.as_tensor(zero_point, dtype=torch.long).reshape(()).clone()
        return quantized.train(layer.training)

    @classmethod
    def _observed(cls, layer, weight_observer, output_observer):
        weight_observer(layer.weight)
        weight = _quantize_weight(layer.weight.float(), weight_observer)
        return cls._quantized(layer, weight, *output_observer.calculate_qparams())

    @classmethod
    def from_float(cls, mod):
        """mod: a layer and what it is fused with, as torch's `prepare` or `prepare_qat` left it."""
        plain = mod.to_float() if hasattr(mod, "to_float") else mod
        if not isinstance(plain, cls._FLOAT_MODULE):
            raise ContractError(f"{cls.__name__} is made of {cls._FLOAT_MODULE.__name__}, got {type(mod).__name__}.")
        if not hasattr(mod, "activation_post_process") or not getattr(mod, "qconfig", None):
            raise ContractError(
                f"this {type(mod).__name__} has observed no data; call torch's prepare on the "
                "network, run it, then convert it."
            )
        observer = mod.weight_fake_quant if hasattr(mod, "to_float") else mod.qconfig.weight()
        return cls._observed(_first(plain), observer, mod.activation_post_process)

    @classmethod
    def _from_reference(cls, layer, scale, zero_point):
        layer = _first(layer)
        return cls._quantized(layer, layer.get_quantized_weight(), scale, zero_point)


def _first(layer):
    """The layer that a fused one begins with."""
    return layer[0] if isinstance(layer, nn.Sequential) else layer


class SparseConv(SparseConvolutionBase, SparseModule, _Quantised):
    """A convolution from int8 to int8 values, in float."""

    _FLOAT_MODULE = SparseConvolution

    @takes(
        SparseConvolutionBase.__init__,
        "ndim in_channels out_channels kernel_size stride padding dilation groups bias subm output_padding"
        " transposed inverse indice_key algo fp32_accum record_voxel_count act_type act_alpha act_beta",
        device=None,
        dtype=None,
    )
    def __init__(self, bias=True, device=None, dtype=None, **geometry):
        SparseModule.__init__(self)
        SparseConvolutionBase.__init__(self, **geometry)
        del self.scale, self.zero_point  # plain numbers of every convolution
        self._hold(self.weight_shape, bias, device)

    def _get_name(self):
        return f"Quantized{type(self).__name__}"

    def extra_repr(self):
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"scale={float(self.scale)}, zero_point={int(self.zero_point)}"
        )

    def forward(self, input):
        return self._forward(input, None)

    def _forward(self, x, add_input):
        y = layer_forward(self, dequantized(x), self._weight.dequantize(), self._bias)
        if add_input is not None:
            y = y.replace_feature(y.features + dequantized(add_input).features)
        y = y.replace_feature(self._finished(y.features))
        return quantize_per_tensor(y, self.scale, self.zero_point, torch.qint8)

    @classmethod
    def _like(cls, conv):
        arguments = constructor_arguments(conv)
        name = arguments.pop("name")
        quantized = cls(**arguments, device=conv.weight.device)
        quantized.name = name
        return quantized

    @classmethod
    def get_qconv(cls, mod, activation_post_process, weight_post_process=None):
        """mod: a convolution in float; the observers of its output and of its weight."""
        observer = weight_post_process or mod.qconfig.weight()
        return cls._observed(mod, observer, activation_post_process)

    @classmethod
    def from_reference(cls, ref_qconv, output_scale, output_zero_point):
        """ref_qconv: an `SpConv`, alone or fused with its ReLU."""
        return cls._from_reference(ref_qconv, output_scale, output_zero_point)


class LinearPerChannelWeight(_Quantised):
    """A linear layer from int8 to int8 values, in float. (torch's own takes no signed ones.)"""

    _FLOAT_MODULE = nn.Linear

    def __init__(self, in_features, out_features, bias_=True, dtype=torch.qint8):
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self._hold([out_features, in_features], bias_, dtype=dtype)

    def _get_name(self):
        return "QuantizedLinearPerChannelWeight"

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"scale={float(self.scale)}, zero_point={int(self.zero_point)}"
        )

    def forward(self, x):
        y = nn.functional.linear(x.dequantize(), self._weight.dequantize(), self._bias)
        return torch.quantize_per_tensor(self._finished(y), self.scale, self.zero_point, self.dtype)

    @classmethod
    def _like(cls, linear):
        return cls(linear.in_features, linear.out_features, linear.bias is not None)

    @classmethod
    def from_reference(cls, ref_qlinear, output_scale, output_zero_point):
        """ref_qlinear: torch's reference layer, with the scales of its weight."""
        return cls._from_reference(ref_qlinear, output_scale, output_zero_point)
