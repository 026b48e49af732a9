"""Folding batch norms into convolutions, which needs no int8."""

import copy

import torch
from spconv.pytorch.quantization import refuse


def fuse_spconv_bn_weights(conv_w, conv_b, bn_rm, bn_rv, bn_eps, bn_w, bn_b):
    """(weight KRSC, bias [K]) of a convolution followed by a batch norm with the given statistics."""
    conv_b = torch.zeros_like(bn_rm) if conv_b is None else conv_b
    bn_w = torch.ones_like(bn_rm) if bn_w is None else bn_w
    bn_b = torch.zeros_like(bn_rm) if bn_b is None else bn_b
    scale = bn_w * torch.rsqrt(bn_rv + bn_eps)
    if conv_w.numel() == conv_w.shape[0] * conv_w.shape[-1]:
        # Kernel volume 1 reads its memory as [C, K]: output channels run fastest.
        c_out, c_in = conv_w.shape[0], conv_w.shape[-1]
        weight = (conv_w.reshape(c_in, c_out) * scale).reshape(conv_w.shape)
    else:
        weight = conv_w * scale.reshape(-1, *[1] * (conv_w.ndim - 1))
    return torch.nn.Parameter(weight), torch.nn.Parameter((conv_b - bn_rm) * scale + bn_b)


def fuse_spconv_bn_eval(conv, bn):
    """A copy of `conv` that does both; both must be in eval mode."""
    if conv.training or bn.training:
        raise AssertionError("fusion is for inference; call .eval() on both layers first.")
    fused = copy.deepcopy(conv)
    fused.weight, fused.bias = fuse_spconv_bn_weights(
        fused.weight, fused.bias, bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias
    )
    return fused


fuse_spconv_act_eval = refuse("fuse_spconv_act_eval")
