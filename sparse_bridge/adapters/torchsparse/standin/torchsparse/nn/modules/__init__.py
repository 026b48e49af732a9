"""All layers."""

from sparse_bridge.core.traced.scripts import refuse_script

from .activation import LeakyReLU, ReLU, SiLU
from .bev import ToBEVConvolution, ToBEVHeightCompression, ToBEVReduction, ToDenseBEVConvolution
from .conv import Conv3d
from .crop import SparseCrop
from .norm import BatchNorm, GroupNorm, InstanceNorm
from .pooling import GlobalAvgPool, GlobalMaxPool

__all__ = [
    "BatchNorm",
    "Conv3d",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "InstanceNorm",
    "LeakyReLU",
    "ReLU",
    "SiLU",
    "SparseCrop",
    "ToBEVConvolution",
    "ToBEVHeightCompression",
    "ToBEVReduction",
    "ToDenseBEVConvolution",
]

for _name in __all__:
    globals()[_name].__prepare_scriptable__ = refuse_script
