"""FlexGEMM's cache of tuned configurations, by its names."""

from sparse_bridge.adapters.flex_gemm.upstream.autotuner import (
    autotune,
    get_autotune_cache,
    load_autotune_cache,
    save_autotune_cache,
)

__all__ = ["autotune", "get_autotune_cache", "load_autotune_cache", "save_autotune_cache"]
