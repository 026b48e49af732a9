"""Layers that train with fake quantisation."""

from spconv.pytorch.quantization.intrinsic.qat.modules import (
    SparseConv,
    SparseConvAddReLU,
    SparseConvBn,
    SparseConvBnAddReLU,
    SparseConvBnReLU,
    SparseConvReLU,
)

__all__ = [
    "SparseConv",
    "SparseConvAddReLU",
    "SparseConvBn",
    "SparseConvBnAddReLU",
    "SparseConvBnReLU",
    "SparseConvReLU",
]
