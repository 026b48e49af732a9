"""Operations on kernel maps."""

from sparse_bridge.adapters.spconv.upstream.extension import (
    SpconvOps as SpconvOps,
)
from sparse_bridge.adapters.spconv.upstream.missing import missing_class

ThrustCustomAllocatorV2 = missing_class(__name__, "ThrustCustomAllocatorV2")
