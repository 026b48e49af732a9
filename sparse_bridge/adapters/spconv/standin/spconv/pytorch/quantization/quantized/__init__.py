"""int8 is not supported."""

from spconv.pytorch.quantization import refuse_class

SparseConv = refuse_class("SparseConv")
LinearPerChannelWeight = refuse_class("LinearPerChannelWeight")
