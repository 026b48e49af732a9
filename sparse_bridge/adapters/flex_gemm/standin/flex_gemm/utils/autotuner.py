"""FlexGEMM's tuner, by its names: what was tuned for its kernels means nothing to the engine, so a
cache that is loaded is kept and given back, and a tuned function runs as it is."""

from sparse_bridge.adapters.flex_gemm.upstream.autotuner import (
    PersistentCacheAutoTuner,
    TritonPersistentCacheAutotuner,
    autotune,
    get_autotune_cache,
    load_autotune_cache,
    save_autotune_cache,
    triton_autotune,
)

__all__ = [
    "PersistentCacheAutoTuner",
    "TritonPersistentCacheAutotuner",
    "autotune",
    "get_autotune_cache",
    "load_autotune_cache",
    "save_autotune_cache",
    "triton_autotune",
]
