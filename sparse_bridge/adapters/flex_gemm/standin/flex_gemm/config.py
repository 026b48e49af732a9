"""Switches of FlexGEMM's tuner; accepted: the engine keeps its tuned tiles in its own cache."""

import os as _os

USE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_USE_AUTOTUNE_CACHE", "1") == "1"
AUTOSAVE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_AUTOSAVE_AUTOTUNE_CACHE", "1") == "1"
AUTOTUNE_CACHE_PATH = _os.environ.get(
    "FLEX_GEMM_AUTOTUNE_CACHE_PATH", _os.path.expanduser("~/.flex_gemm/autotune_cache.json")
)
USE_AUTOTUNE_RUNTIME = _os.environ.get("FLEX_GEMM_USE_AUTOTUNE_RUNTIME", "1") == "1"
IS_CUDA_EXTENSION_AVAILABLE = True  # `kernels.cuda` is answered
USE_CUDA_EXTENSION = True
