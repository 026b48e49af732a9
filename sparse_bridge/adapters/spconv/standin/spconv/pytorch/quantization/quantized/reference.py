"""int8 is not supported."""

from spconv.pytorch.quantization import refuse_class

SpConv = refuse_class("SpConv")
