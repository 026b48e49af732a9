"""Switches of FlexGEMM 2.0.

SPCONV_ALLOW_TF32: None follows torch's own switch; True or False is obeyed at every call. The
others are accepted: the engine keeps its tuned tiles in its own cache.
"""

import os as _os

SPCONV_ALLOW_TF32 = None
USE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_USE_AUTOTUNE_CACHE", "1") == "1"
AUTOSAVE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_AUTOSAVE_AUTOTUNE_CACHE", "1") == "1"
AUTOTUNE_CACHE_PATH = _os.environ.get(
    "FLEX_GEMM_AUTOTUNE_CACHE_PATH", _os.path.expanduser("~/.flex_gemm/autotune_cache.json")
)
AUTOTUNE_MODE = _os.environ.get("FLEX_GEMM_AUTOTUNE_MODE", "adaptive")
