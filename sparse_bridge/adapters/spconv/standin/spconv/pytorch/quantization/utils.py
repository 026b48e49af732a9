"""Folding batch norms and activations into convolutions."""

import copy

import torch
from cumm import tensorview as tv
from torch import nn

from sparse_bridge.core.conv.epilogue import row_of
from sparse_bridge.errors import ContractError, UnsupportedError

_ARGUMENTS = (
    "ndim",
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "subm",
    "output_padding",
    "transposed",
    "inverse",
    "indice_key",
    "algo",
    "fp32_accum",
    "record_voxel_count",
    "act_type",
    "act_alpha",
    "act_beta",
    "name",
)


def constructor_arguments(conv):
    """Keywords that make a `SparseConvolution` like this one."""
    return {**{name: getattr(conv, name) for name in _ARGUMENTS}, "bias": conv.bias is not None}


def fold_weight(weight, factor, pointwise):
    """weight KRSC with every output channel multiplied by factor [K].

    pointwise: a layer of kernel volume 1, whose memory is read as [C, K].
    """
    if pointwise:  # output channels run fastest in memory
        return (weight.reshape(-1, weight.shape[0]) * factor).reshape(weight.shape)
    return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))


def fuse_spconv_bn_weights(conv_w_OKI, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b):
    """(weight KRSC, bias [K]) of a convolution followed by a batch norm of these statistics.

    A kernel of volume 1 is taken for one of stride 1, whose memory is read as [C, K].
    """
    pointwise = conv_w_OKI.numel() == conv_w_OKI.shape[0] * conv_w_OKI.shape[-1]
    weight, bias = _folded(conv_w_OKI, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b, pointwise)
    return nn.Parameter(weight), nn.Parameter(bias)


def _folded(conv_w, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b, pointwise):
    conv_b = torch.zeros_like(bn_rm) if conv_b is None else conv_b
    bn_w = torch.ones_like(bn_rm) if bn_w is None else bn_w
    bn_b = torch.zeros_like(bn_rm) if bn_b is None else bn_b
    factor = bn_w * torch.rsqrt(bn_rv + bn_eps)
    return fold_weight(conv_w, factor, pointwise), (conv_b - bn_rm) * factor + bn_b


def norm_folded(conv, bn):
    """(weight, bias) of `conv` followed by `bn` in eval mode."""
    return _folded(conv.weight, conv.bias, bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias, conv.conv1x1)


def fuse_spconv_bn_eval(conv, bn):
    """A copy of `conv` that does both; both must be in eval mode."""
    _in_eval(conv, bn)
    fused = copy.deepcopy(conv)
    fused.weight, fused.bias = map(nn.Parameter, norm_folded(fused, bn))
    return fused


def fuse_spconv_act_eval(conv, act):
    """A copy of `conv` that ends in `act` (ReLU, LeakyReLU or Sigmoid); both must be in eval mode.

    Raises ContractError for a layer of kernel volume 1, which takes no activation.
    """
    _in_eval(conv, act)
    row = row_of(act)
    if row is None or not row.act_type:
        raise UnsupportedError(f"{type(act).__name__} cannot be fused; expected ReLU, LeakyReLU or Sigmoid.")
    if conv.conv1x1:
        raise ContractError("a convolution of kernel size 1 takes no fused activation.")
    fused = copy.deepcopy(conv)
    fused.act_type = getattr(tv.gemm.Activation, row.module.__name__)
    fused.act_alpha = getattr(act, "negative_slope", 0)
    return fused


def _in_eval(*layers):
    if any(layer.training for layer in layers):
        raise ContractError("fusion is for inference; call .eval() on both layers first.")
