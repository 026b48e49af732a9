"""FlexGEMM's cache of tuned configurations."""

from .autotuner import autotune, get_autotune_cache, load_autotune_cache, save_autotune_cache

__all__ = ["autotune", "autotuner", "get_autotune_cache", "load_autotune_cache", "save_autotune_cache"]
