"""Folding batch norms into convolutions, which needs no int8."""

import copy

import torch
from spconv.pytorch.quantization import refuse

from sparse_bridge.errors import ContractError


def fuse_spconv_bn_weights(conv_w, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b):
    """(weight KRSC, bias [K]) of a convolution followed by a batch norm of these statistics.

    A kernel of volume 1 is taken for one of stride 1, whose memory is read as [C, K].
    """
    pointwise = conv_w.numel() == conv_w.shape[0] * conv_w.shape[-1]
    return _folded(conv_w, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b, pointwise)


def _folded(conv_w, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b, pointwise):
    conv_b = torch.zeros_like(bn_rm) if conv_b is None else conv_b
    bn_w = torch.ones_like(bn_rm) if bn_w is None else bn_w
    bn_b = torch.zeros_like(bn_rm) if bn_b is None else bn_b
    scale = bn_w * torch.rsqrt(bn_rv + bn_eps)
    if pointwise:  # output channels run fastest in memory
        weight = (conv_w.reshape(-1, conv_w.shape[0]) * scale).reshape(conv_w.shape)
    else:
        weight = conv_w * scale.reshape(-1, *[1] * (conv_w.ndim - 1))
    return torch.nn.Parameter(weight), torch.nn.Parameter((conv_b - bn_rm) * scale + bn_b)


def fuse_spconv_bn_eval(conv, bn):
    """A copy of `conv` that does both; both must be in eval mode."""
    if conv.training or bn.training:
        raise ContractError("fusion is for inference; call .eval() on both layers first.")
    fused = copy.deepcopy(conv)
    fused.weight, fused.bias = _folded(
        fused.weight, fused.bias, bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias,
        conv.conv1x1,
    )  # fmt: skip
    return fused


fuse_spconv_act_eval = refuse("fuse_spconv_act_eval")
