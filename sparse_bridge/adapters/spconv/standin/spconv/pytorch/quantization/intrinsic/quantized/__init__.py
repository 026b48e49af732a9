"""int8 is not supported."""

from spconv.pytorch.quantization import refuse_class

SparseConvReLU = refuse_class("SparseConvReLU")
SparseConvAddReLU = refuse_class("SparseConvAddReLU")
LinearPerChannelWeightReLU = refuse_class("LinearPerChannelWeightReLU")
