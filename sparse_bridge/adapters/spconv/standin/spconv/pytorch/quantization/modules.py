"""Blocks that are easy to quantise."""

from spconv.pytorch.conv import SparseConvolution as SparseConvolution
from spconv.pytorch.core import SparseConvTensor as SparseConvTensor
from spconv.pytorch.modules import SparseModule


class ConvBatchNormAddAct(SparseModule):
    """act(bn(conv(x)) + x_add)"""

    def __init__(self, conv, bn, act):
        super().__init__()
        self.conv, self.bn, self.act = conv, bn, act

    def forward(self, x, x_add):
        x = self.conv(x)
        x = x.replace_feature(self.bn(x.features))
        total = x + x_add
        return total.replace_feature(self.act(total.features))
