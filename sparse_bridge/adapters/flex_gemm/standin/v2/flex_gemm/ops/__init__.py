"""Operations on sparse voxels."""

from sparse_bridge.adapters.flex_gemm.errors import other_generation as _other_generation
from sparse_bridge.adapters.flex_gemm.v2.functions import NAMES as _NAMES

from . import spconv

globals().update(_NAMES)

__all__ = ["spconv", *_NAMES]


def __getattr__(name):
    if name in ("grid_sample", "serialize"):
        raise _other_generation(f"{__name__}.{name}", "1")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
