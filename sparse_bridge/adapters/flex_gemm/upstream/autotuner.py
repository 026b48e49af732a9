"""FlexGEMM's tuner without tuning: names, attributes and files as its users know them."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....errors import DeviceError
from ..errors import ArgumentValueError

_cache: dict[str, Any] = {}
_begun = False  # whether the file of the default path was read


class CacheTypeError(ArgumentValueError, TypeError):
    """Something that is neither a path nor a mapping."""


class PersistentCacheAutoTuner:
    """A function with the attributes of a tuned one; calls run it as it is."""

    def __init__(
        self,
        kernel: Callable[..., Any],
        configs: Any = (),
        key: Any = (),
        config_fn: Any = None,
        key_fn: Any = None,
        warmup: int = 3,
        runs: int = 10,
        verbose: bool | None = None,
    ) -> None:
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


def path_of_environment() -> str:
    """`FLEX_GEMM_AUTOTUNE_CACHE_PATH`, or the file in the home directory."""
    default = os.path.expanduser("~/.flex_gemm/autotune_cache.json")
    return os.environ.get("FLEX_GEMM_AUTOTUNE_CACHE_PATH", default)


def _switch(name: str, default: Any) -> Any:
    """A constant of `flex_gemm` (1.x) or `flex_gemm.config`; of two the one that was assigned."""
    modules = map(sys.modules.get, ("flex_gemm", "flex_gemm.config"))
    values = [vars(module)[name] for module in modules if module is not None and name in vars(module)]
    return next((value for value in values if value != default), default)


def _default_path() -> pathlib.Path:
    return pathlib.Path(_switch("AUTOTUNE_CACHE_PATH", path_of_environment()))


def _begin() -> None:
    """Load the file of the default path, once, unless USE_AUTOTUNE_CACHE says no: to save is not to
    lose what it holds."""
    global _begun
    if not _begun and _switch("USE_AUTOTUNE_CACHE", True):
        _begun = True
        stored = _read(_default_path())
        _cache.update({**stored, **_cache})


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The entries of a file, none without one. Raises ArgumentValueError."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (TypeError, ValueError) as error:
        raise ArgumentValueError(
            f"{path} is no autotune cache ({error}); expected JSON. Remove it, or name another "
            "one: FLEX_GEMM_AUTOTUNE_CACHE_PATH."
        ) from None


def get_autotune_cache() -> dict[str, Any]:
    """What was loaded."""
    _begin()
    return _cache


def load_autotune_cache(path_or_cache: Any = None) -> None:
    """Keep the entries of a JSON file or a mapping; a missing file is fine. Raises TypeError for
    anything else."""
    if isinstance(path_or_cache, Mapping):
        _cache.update(path_or_cache)
        return
    if path_or_cache is not None and not isinstance(path_or_cache, (str, os.PathLike)):
        raise CacheTypeError(f"load_autotune_cache got a {type(path_or_cache).__name__}; expected a path or a mapping.")
    path = _default_path() if path_or_cache is None else pathlib.Path(path_or_cache)
    _cache.update(_read(path))


def save_autotune_cache(path: Any = None) -> None:
    """Write what was loaded as JSON."""
    _begin()
    file = _default_path() if path is None else pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_cache, indent=1), encoding="utf-8")


def get_num_sm() -> int:
    """Multiprocessors of the current GPU. Raises DeviceError where there is none."""
    if not torch.cuda.is_available():
        raise DeviceError("get_num_sm asks a GPU for its multiprocessors, and there is none.")
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def get_autotune_config(
    default: Any = None, platform: Mapping[str, Any] | None = None, device: Mapping[str, Any] | None = None
) -> Any:
    """The configurations of the current GPU: by a part of its name, else by its platform, "cuda" or
    "hip", else the default. Raises ArgumentValueError where there is none."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    platform_name = "hip" if torch.version.hip else "cuda"
    for table, label in ((device, name), (platform, platform_name)):
        for part, configs in (table or {}).items():
            if part.lower() in label.lower():
                return configs
    if default is None:
        raise ArgumentValueError(f"no configurations for {name} ({platform_name}), and no default.")
    return default
