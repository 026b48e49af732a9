"""Switches of FlexGEMM's tuner.

USE_AUTOTUNE_CACHE and AUTOTUNE_CACHE_PATH concern the file that `flex_gemm.utils` loads and saves.
The others have no meaning: nothing is tuned for FlexGEMM's kernels; the engine has its own tiles.
"""

import os as _os

from sparse_bridge.adapters.flex_gemm.upstream.autotuner import path_of_environment as _path_of_environment

USE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_USE_AUTOTUNE_CACHE", "1") == "1"
AUTOSAVE_AUTOTUNE_CACHE = _os.environ.get("FLEX_GEMM_AUTOSAVE_AUTOTUNE_CACHE", "1") == "1"
AUTOTUNE_CACHE_PATH = _path_of_environment()
USE_AUTOTUNE_RUNTIME = _os.environ.get("FLEX_GEMM_USE_AUTOTUNE_RUNTIME", "1") == "1"
IS_CUDA_EXTENSION_AVAILABLE = True  # `kernels.cuda` is answered
USE_CUDA_EXTENSION = True
