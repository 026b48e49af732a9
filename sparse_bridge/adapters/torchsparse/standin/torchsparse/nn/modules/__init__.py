"""All layers."""

from .activation import LeakyReLU, ReLU, SiLU
from .bev import (
    ToBEVConvolution,
    ToBEVHeightCompression,
    ToBEVReduction,
    ToDenseBEVConvolution,
)
from .conv import Conv3d
from .crop import SparseCrop
from .norm import BatchNorm, GroupNorm, InstanceNorm
from .pooling import GlobalAvgPool, GlobalMaxPool

__all__ = [
    "BatchNorm", "Conv3d", "GlobalAvgPool", "GlobalMaxPool", "GroupNorm", "InstanceNorm",
    "LeakyReLU", "ReLU", "SiLU", "SparseCrop", "ToBEVConvolution", "ToBEVHeightCompression",
    "ToBEVReduction", "ToDenseBEVConvolution",
]  # fmt: skip
