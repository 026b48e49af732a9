"""Adapters, one per framework, and the life cycle they share; each is imported at first use."""

from __future__ import annotations

from types import ModuleType

from ..names import modules_of
from .base import ADAPTERS

__all__ = ["ADAPTERS"]


def __getattr__(name: str) -> ModuleType:
    return modules_of(__name__, *ADAPTERS, "convert")(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *ADAPTERS, "convert"})
