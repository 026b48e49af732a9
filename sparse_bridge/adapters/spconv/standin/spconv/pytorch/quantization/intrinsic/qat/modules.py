"""Convolutions whose weights are rounded as int8 would hold them, while they train.

With a norm behind it, a layer rounds the weight that it will have once the norm is folded in; the
norm sees the result divided by the fold again, and keeps its statistics.
"""

import torch
from cumm import tensorview as tv
from spconv.core import ConvAlgo as ConvAlgo
from spconv.pytorch.conv import SparseConvolution
from spconv.pytorch.core import SparseConvTensor as SparseConvTensor
from spconv.pytorch.quantization import intrinsic
from spconv.pytorch.quantization.utils import constructor_arguments, fold_weight, norm_folded
from spconv.pytorch.quantization.utils import fuse_spconv_bn_weights as fuse_spconv_bn_weights
from torch import nn

from sparse_bridge.adapters.spconv.conv import layer_forward
from sparse_bridge.errors import ContractError

_NONE = tv.gemm.Activation.None_


class _SparseConv(SparseConvolution):
    _FLOAT_CONV_MODULE = SparseConvolution

    def __init__(
        self,
        ndim,
        in_channels,
        out_channels,
        kernel_size=3,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        subm=False,
        output_padding=0,
        transposed=False,
        inverse=False,
        indice_key=None,
        algo=None,
        fp32_accum=None,
        record_voxel_count=False,
        act_type=_NONE,
        act_alpha=0,
        act_beta=0,
        name=None,
        qconfig=None,
        device=None,
        dtype=None,
    ):
        super().__init__(
            ndim,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            subm,
            output_padding,
            transposed,
            inverse,
            indice_key,
            algo,
            fp32_accum,
            record_voxel_count,
            act_type,
            act_alpha,
            act_beta,
            name=name,
            device=device,
            dtype=dtype,
        )
        if not qconfig:
            raise ContractError(f"{type(self).__name__} needs a qconfig, which rounds its weight.")
        self.qconfig = qconfig
        self.weight_fake_quant = qconfig.weight()

    @classmethod
    def _of(cls, conv, qconfig, **more):
        layer = cls(**constructor_arguments(conv), qconfig=qconfig, **more)
        layer.weight, layer.bias = conv.weight, conv.bias
        layer.weight_fake_quant.to(conv.weight.device)
        return layer

    def _float_conv(self, weight, bias):
        arguments = {**constructor_arguments(self), "bias": bias is not None}
        float_conv = self._FLOAT_CONV_MODULE(**arguments)
        float_conv.weight = nn.Parameter(weight.detach())
        if bias is not None:
            float_conv.bias = nn.Parameter(bias.detach())
        return float_conv.train(self.training)


class SparseConv(_SparseConv):
    """A convolution with rounded weights."""

    _FLOAT_MODULE = SparseConvolution

    def _convolve(self, input):
        weight = self.weight_fake_quant(self.weight)
        return layer_forward(self, input, weight, self.bias)

    def forward(self, input):
        return self._convolve(input)

    @classmethod
    def from_float(cls, mod, use_precomputed_fake_quant=False):
        """mod: a convolution, or one fused with what follows; it has a `qconfig`."""
        conv = mod if isinstance(mod, SparseConvolution) else mod[0]
        return cls._of(conv, mod.qconfig)

    def to_float(self):
        return self._float_conv(self.weight, self.bias)


class SparseConvReLU(SparseConv):
    _FLOAT_MODULE = intrinsic.SpconvReLUNd

    def forward(self, input):
        y = self._convolve(input)
        return y.replace_feature(y.features.relu())

    def to_float(self):
        return intrinsic.SpconvReLUNd(super().to_float(), nn.ReLU())


class SparseConvAddReLU(SparseConv):
    _FLOAT_MODULE = intrinsic.SpconvAddReLUNd

    def forward(self, input, add_input):
        y = self._convolve(input) + add_input
        return y.replace_feature(y.features.relu())

    def to_float(self):
        return intrinsic.SpconvAddReLUNd(super().to_float(), _sparse_relu())


class SparseConvBn(_SparseConv):
    """A convolution and its batch norm."""

    _FLOAT_MODULE = intrinsic.SpconvBnNd

    def __init__(
        self,
        ndim,
        in_channels,
        out_channels,
        kernel_size=3,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        subm=False,
        output_padding=0,
        transposed=False,
        inverse=False,
        indice_key=None,
        algo=None,
        fp32_accum=None,
        record_voxel_count=False,
        act_type=_NONE,
        act_alpha=0,
        act_beta=0,
        name=None,
        eps=1e-05,
        momentum=0.1,
        freeze_bn=False,
        qconfig=None,
    ):
        super().__init__(
            ndim,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            subm,
            output_padding,
            transposed,
            inverse,
            indice_key,
            algo,
            fp32_accum,
            record_voxel_count,
            act_type,
            act_alpha,
            act_beta,
            name,
            qconfig,
        )
        self.bn = nn.BatchNorm1d(out_channels, eps, momentum)
        self.freeze_bn = freeze_bn
        if freeze_bn:
            self.freeze_bn_stats()

    def _normed(self, input):
        bn = self.bn
        factor = bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        # A channel whose norm multiplies by 0 is not divided by it again.
        factor = torch.where(factor == 0, torch.ones_like(factor), factor)
        weight = self.weight_fake_quant(fold_weight(self.weight, factor, self.conv1x1))
        y = layer_forward(self, input, weight, None)
        features = y.features / factor.to(y.features.dtype)
        if self.bias is not None:
            features = features + self.bias
        return y.replace_feature(bn(features))

    def forward(self, input):
        return self._normed(input)

    def reset_running_stats(self):
        self.bn.reset_running_stats()

    def reset_bn_parameters(self):
        self.bn.reset_parameters()

    def update_bn_stats(self):
        """Let the norm follow the batches again."""
        self.freeze_bn = False
        self.bn.training = self.training
        return self

    def freeze_bn_stats(self):
        """Keep the norm's statistics, in training too."""
        self.freeze_bn = True
        self.bn.training = False
        return self

    def train(self, mode=True):
        super().train(mode)
        if self.freeze_bn:
            self.bn.training = False
        return self

    @classmethod
    def from_float(cls, mod, use_precomputed_fake_quant=False):
        """mod: a convolution fused with a norm and what follows; it has a `qconfig`."""
        conv, bn = mod[0], mod[1]
        layer = cls._of(conv, mod.qconfig, eps=bn.eps, momentum=bn.momentum)
        layer.bn = bn
        return layer.train(mod.training)

    def to_float(self):
        return self._float_conv(*norm_folded(self, self.bn))


class SparseConvBnReLU(SparseConvBn):
    _FLOAT_MODULE = intrinsic.SpconvBnReLUNd

    def forward(self, input):
        y = self._normed(input)
        return y.replace_feature(y.features.relu())

    def to_float(self):
        return intrinsic.SpconvReLUNd(super().to_float(), nn.ReLU())


class SparseConvBnAddReLU(SparseConvBn):
    _FLOAT_MODULE = intrinsic.SpconvBnAddReLUNd

    def forward(self, input, add_input):
        y = self._normed(input) + add_input
        return y.replace_feature(y.features.relu())

    def to_float(self):
        return intrinsic.SpconvAddReLUNd(super().to_float(), _sparse_relu())


def _sparse_relu():
    from spconv.pytorch.modules import SparseReLU

    return SparseReLU()
