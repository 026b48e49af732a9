"""Functions of FlexGEMM 2.0's modules that its own layers go through, and that programs replace there."""

from __future__ import annotations

import sys
import types
from typing import Any

from ...steps import package_of
from . import functions

__all__ = ["held", "is_theirs", "modules_of", "replaced"]

_BEHIND = "NeighborCache", "NeighborCacheT", "build_neighbor_cache"
_SHAPES = tuple(name for name in functions.NAMES if name.startswith("compute_strided_kernel_size_"))
_Places = list[tuple[dict[str, Any], str, Any]]  # names of a module, one of them, what it is while nobody replaces it
_known: dict[tuple[str, int | None], tuple[Any, _Places]] = {}


def modules_of(package: str) -> list[types.ModuleType]:
    """Those of the package that are imported: all that its own `__init__` takes functions from."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package and isinstance(module, types.ModuleType)
    ]


def held(module: types.ModuleType, name: str) -> bool:
    """Whether a module holds a function or class under that name, and no folder."""
    return not isinstance(vars(module).get(name, module), types.ModuleType)


def is_theirs(module: types.ModuleType, name: str) -> bool:
    """Whether it is the package's own, or ours; else somebody has replaced it."""
    return package_of(vars(module)[name]) in ("", "flex_gemm", "sparse_bridge")


def replaced(function: str, dimension: int | None) -> str | None:
    """A function, or one that it goes through, that is not ours any more in a module; None where all are.

    function: what a layer of `dimension` axes computes, by its name without a number.
    """
    package, places = _known.get((function, dimension), (None, []))
    if package is not sys.modules.get("flex_gemm"):
        numbered = () if dimension is None else (f"{function}{dimension}d",)
        names = (function, *numbered, *_BEHIND, *(_SHAPES if function.startswith("sparse_") else ()))
        modules = modules_of("flex_gemm")
        places = [(vars(m), name, _ours(vars(m)[name], name)) for m in modules for name in names if held(m, name)]
        _known[function, dimension] = sys.modules.get("flex_gemm"), places
    for namespace, name, ours in places:
        if namespace.get(name) is not ours:
            return f"{namespace['__name__']}.{name}"
    return None


def _ours(current: Any, name: str) -> Any:
    """What a module holds while nobody replaces it; a patch is a copy of our function, under its original's name."""
    ours = functions.NAMES[name]
    return current if getattr(current, "__code__", None) is getattr(ours, "__code__", ours) else ours
