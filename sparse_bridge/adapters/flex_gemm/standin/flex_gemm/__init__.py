"""FlexGEMM 1.x, answered by sparse_bridge."""

import os as _os

from . import kernels, ops, utils

__all__ = [
    "AUTOSAVE_AUTOTUNE_CACHE", "AUTOTUNE_CACHE_PATH", "USE_AUTOTUNE_CACHE", "kernels", "ops",
    "utils",
]  # fmt: skip

# Accepted; the engine keeps its tuned tiles in a cache of its own.
USE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_USE_AUTOTUNE_CACHE", "1") == "1"
AUTOSAVE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_AUTOSAVE_AUTOTUNE_CACHE", "1") == "1"
AUTOTUNE_CACHE_PATH = _os.environ.get(
    "FLEX_GEMM_AUTOTUNE_CACHE_PATH", _os.path.expanduser("~/.flex_gemm/autotune_cache.json")
)
