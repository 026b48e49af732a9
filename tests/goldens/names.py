"""What a dotted name is."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import Any

__all__ = ["attribute", "dotted"]


def dotted(root: Any, path: str) -> Any:
    """`a.b.c` below `root`: attributes, and submodules that are not imported yet."""
    name = getattr(root, "__name__", "")
    for part in path.split(".") if path else ():
        try:
            root = getattr(root, part)
        except AttributeError:
            root = submodule(name, part)
        name += f".{part}"
    return root


def submodule(name: str, part: str) -> Any:
    """`name.part`, of modules: a function may hide the module of its name."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(f"{name}.{part}")
    with contextlib.suppress(ModuleNotFoundError):
        return getattr(importlib.import_module(name), part)
    raise AttributeError(f"{name} has no {part}")


def attribute(value: Any, path: Iterable[str]) -> Any:
    """Attributes, and items where a part is a number."""
    for part in path:
        number = part.lstrip("-").isdigit()
        value = value[int(part)] if number else getattr(value, part)
    return value
