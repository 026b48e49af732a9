"""Operations on sparse voxels."""

from sparse_bridge.adapters.flex_gemm.errors import other_generation as _other_generation
from sparse_bridge.adapters.flex_gemm.v2.functions import NAMES as _NAMES

from . import neighbor_cache, pool, sample, spconv, utils

globals().update(_NAMES)

__all__ = ["neighbor_cache", "pool", "sample", "spconv", "utils", *_NAMES]


def __getattr__(name):
    if name in ("grid_sample", "serialize"):
        raise _other_generation(f"{__name__}.{name}", "1")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
