"""Operations on kernel maps, pools and voxelizers."""

from spconv.core_cc.csrc.sparse.all import ops1d, ops2d, ops3d, ops4d, ops_cpu1d, ops_cpu2d, ops_cpu3d, ops_cpu4d

from sparse_bridge.adapters.spconv.upstream.extension import SpconvOps
from sparse_bridge.adapters.spconv.upstream.missing import missing_class

__all__ = [
    "SpconvOps",
    "ThrustCustomAllocatorV2",
    "ops1d",
    "ops2d",
    "ops3d",
    "ops4d",
    "ops_cpu1d",
    "ops_cpu2d",
    "ops_cpu3d",
    "ops_cpu4d",
]

ThrustCustomAllocatorV2 = missing_class(__name__, "ThrustCustomAllocatorV2")
