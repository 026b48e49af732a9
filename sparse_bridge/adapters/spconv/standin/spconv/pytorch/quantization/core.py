"""int8 is not supported."""

from spconv.pytorch.quantization import refuse

quantized_add = refuse("quantized_add")
