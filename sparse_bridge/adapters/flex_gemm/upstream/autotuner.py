"""FlexGEMM's tuner without tuning: names, attributes and files as its users know them."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ArgumentValueError

_cache: dict[str, Any] = {}


class CacheTypeError(ArgumentValueError, TypeError):
    """Something that is neither a path nor a mapping."""


class PersistentCacheAutoTuner:
    """A function with the attributes of a tuned one; calls run it as it is."""

    def __init__(
        self, kernel: Callable[..., Any], configs: Any = (), key: Any = (), config_fn: Any = None,
        key_fn: Any = None, warmup: int = 3, runs: int = 10, verbose: bool | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.configs, self.key = kernel, configs, key
        self.config_fn, self.key_fn, self.warmup, self.runs = config_fn, key_fn, warmup, runs
        loud = os.environ.get("FLEX_GEMM_AUTOTUNER_VERBOSE", "0") == "1"
        self.verbose = loud if verbose is None else verbose
        self.cache: dict[Any, Any] = {}
        functools.update_wrapper(self, kernel)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel(*args, **kwargs)


TritonPersistentCacheAutotuner = PersistentCacheAutoTuner


def autotune(*args: Any, **kwargs: Any) -> Callable[..., PersistentCacheAutoTuner]:
    """A decorator, as FlexGEMM's."""
    return lambda kernel: PersistentCacheAutoTuner(kernel, *args, **kwargs)


triton_autotune = autotune


def _default_path() -> pathlib.Path:
    package = sys.modules.get("flex_gemm")
    return pathlib.Path(getattr(package, "AUTOTUNE_CACHE_PATH", "autotune_cache.json"))


def get_autotune_cache() -> dict[str, Any]:
    """What was loaded."""
    return _cache


def load_autotune_cache(path_or_cache: Any = None) -> None:
    """Keep the entries of a JSON file or a mapping; a missing file is fine. Raises TypeError for
    anything else."""
    if isinstance(path_or_cache, Mapping):
        _cache.update(path_or_cache)
        return
    if path_or_cache is not None and not isinstance(path_or_cache, (str, os.PathLike)):
        raise CacheTypeError(
            f"load_autotune_cache got a {type(path_or_cache).__name__}; expected a path or a "
            "mapping."
        )
    path = _default_path() if path_or_cache is None else pathlib.Path(path_or_cache)
    if path.is_file():
        _cache.update(json.loads(path.read_text(encoding="utf-8")))


def save_autotune_cache(path: Any = None) -> None:
    """Write what was loaded as JSON."""
    place = _default_path() if path is None else pathlib.Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(_cache, indent=1), encoding="utf-8")
