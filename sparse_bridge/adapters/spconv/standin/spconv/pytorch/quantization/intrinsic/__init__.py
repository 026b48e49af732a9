"""int8 is not supported."""

from spconv.pytorch.quantization import refuse_class

SpconvReLUNd = refuse_class("SpconvReLUNd")
SpconvBnNd = refuse_class("SpconvBnNd")
SpconvBnReLUNd = refuse_class("SpconvBnReLUNd")
SpconvBnAddReLUNd = refuse_class("SpconvBnAddReLUNd")
SpconvAddReLUNd = refuse_class("SpconvAddReLUNd")
