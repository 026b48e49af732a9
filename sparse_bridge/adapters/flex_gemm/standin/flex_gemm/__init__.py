"""FlexGEMM 1.x, answered by sparse_bridge."""

from sparse_bridge.adapters.flex_gemm.errors import other_generation as _other_generation

from . import config, kernels, ops, utils
from .config import AUTOSAVE_AUTOTUNE_CACHE, AUTOTUNE_CACHE_PATH, USE_AUTOTUNE_CACHE
from .ops.grid_sample import grid_sample_3d
from .ops.spconv.submanifold_conv import (
    sparse_submanifold_conv,
    sparse_submanifold_conv3d,
    sparse_submanifold_conv_any_offset,
)

__all__ = [
    "AUTOSAVE_AUTOTUNE_CACHE",
    "AUTOTUNE_CACHE_PATH",
    "USE_AUTOTUNE_CACHE",
    "config",
    "grid_sample_3d",
    "kernels",
    "ops",
    "sparse_submanifold_conv",
    "sparse_submanifold_conv3d",
    "sparse_submanifold_conv_any_offset",
    "utils",
]


def __getattr__(name):
    if name == "nn":  # an AttributeError: users tell the generations apart by this name
        raise _other_generation("flex_gemm.nn", "2.0")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
