"""A convolution and what follows it as one module; they compute what the parts compute."""

from spconv.pytorch.conv import SparseConvolution as SparseConvolution
from spconv.pytorch.core import SparseConvTensor as SparseConvTensor
from spconv.pytorch.modules import is_spconv_module
from torch.ao.nn.intrinsic.modules.fused import _FusedModule


def _apply(module, x):
    if is_spconv_module(module):
        return module(x)
    return x.replace_feature(module(x.features))


class _FusedSparseModule(_FusedModule):
    def forward(self, input):
        for module in self:
            input = _apply(module, input)
        return input


class SpconvReLUNd(_FusedSparseModule):
    def __init__(self, conv, relu):
        super().__init__(conv, relu)


class SpconvBnNd(_FusedSparseModule):
    def __init__(self, conv, bn):
        super().__init__(conv, bn)


class SpconvBnReLUNd(_FusedSparseModule):
    def __init__(self, conv, bn, relu):
        super().__init__(conv, bn, relu)


class _Residual(_FusedSparseModule):
    """relu(the others' result + add_input)"""

    def forward(self, input, add_input):
        *layers, relu = self
        for module in layers:
            input = _apply(module, input)
        return _apply(relu, input + add_input)


class SpconvAddReLUNd(_Residual):
    def __init__(self, conv, relu):
        super().__init__(conv, relu)


class SpconvBnAddReLUNd(_Residual):
    def __init__(self, conv, bn, relu):
        super().__init__(conv, bn, relu)
