"""Quantising tensors, sparse or not."""

import torch
from spconv.pytorch.core import SparseConvTensor


def quantize_per_tensor(ten, scale, zero_point, dtype):
    """A tensor, a SparseConvTensor or a list of them, with values of `dtype` (torch.qint8)."""
    if isinstance(ten, (list, tuple)):
        return [quantize_per_tensor(part, scale, zero_point, dtype) for part in ten]
    if isinstance(ten, SparseConvTensor):
        return ten.replace_feature(quantize_per_tensor(ten.features, scale, zero_point, dtype))
    return torch.quantize_per_tensor(ten, scale, zero_point, dtype)


def quantized_add(x, y, scale, zero_point):
    """x + y of quantised tensors, sparse or not, quantised again."""
    total = x.dequantize() + y.dequantize()
    first = x.features if isinstance(x, SparseConvTensor) else x
    return quantize_per_tensor(total, scale, zero_point, first.dtype)
