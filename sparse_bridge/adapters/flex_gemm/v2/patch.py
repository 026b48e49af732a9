"""Seams of an installed FlexGEMM 2.0: `forward` of its layers, and its functions in every module of
the package that has them.

A function that a program imported by name before `enable()` is not reached; layers are, unless a
program has replaced a function that they go through.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ...base import Patch
from ..options import switch
from . import functions, modules
from .steps import held, is_theirs, modules_of

_VERSIONS = "2.0"
_OLD = "sparse_submanifold_conv3d"


def patches(package: Any) -> list[Patch]:
    """Patches for the FlexGEMM 2.0 that is imported as `package`."""
    result = _layers(importlib.import_module("flex_gemm.nn"))
    ops = importlib.import_module("flex_gemm.ops")
    for owner in modules_of(package.__name__):
        result += [
            Patch(owner, name, function, "functions and caches", _VERSIONS)
            for name, function in functions.NAMES.items()
            if held(owner, name) and is_theirs(owner, name)
        ]
    spconv = getattr(ops, "spconv", None)
    if hasattr(spconv, _OLD):
        old = functions.sparse_submanifold_conv3d
        result.append(Patch(spconv, _OLD, old, "a name of 1.x", _VERSIONS))
    return result + switch("flex_gemm.config", "SPCONV_ALLOW_TF32", _VERSIONS)


def _layers(nn: Any) -> list[Patch]:
    """One for every class, those of a number first: they inherit from the others."""
    result = []
    for name, ours in reversed(modules.NAMES.items()):
        theirs = getattr(nn, name, None)
        if theirs is not None:
            base_name = name[:-2] if ours.dimension else name
            forward = functools.partial(modules.forward_of, base_name, ours.dimension)
            result.append(Patch(theirs, "forward", forward, "layers", _VERSIONS, wraps=True))
    return result
