"""Adapters, one per framework, and the life cycle they share; each is imported at first use."""

from __future__ import annotations

import importlib
from types import ModuleType

from .base import ADAPTERS

__all__ = ["ADAPTERS"]


def __getattr__(name: str) -> ModuleType:
    if name in ADAPTERS or name == "convert":
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *ADAPTERS, "convert"})
