"""Pools over whole batch items."""

from torch import nn
from torchsparse.nn import functional as F

__all__ = ["GlobalAvgPool", "GlobalMaxPool"]


class GlobalAvgPool(nn.Module):
    """SparseTensor -> means [B, C]."""

    def forward(self, input):
        return F.global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """SparseTensor -> maxima [B, C]."""

    def forward(self, input):
        return F.global_max_pool(input)
