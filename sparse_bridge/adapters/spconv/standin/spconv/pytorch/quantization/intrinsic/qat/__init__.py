"""int8 is not supported."""

from spconv.pytorch.quantization import refuse_class

SparseConv = refuse_class("SparseConv")
SparseConvReLU = refuse_class("SparseConvReLU")
SparseConvAddReLU = refuse_class("SparseConvAddReLU")
SparseConvBn = refuse_class("SparseConvBn")
SparseConvBnReLU = refuse_class("SparseConvBnReLU")
SparseConvBnAddReLU = refuse_class("SparseConvBnAddReLU")
