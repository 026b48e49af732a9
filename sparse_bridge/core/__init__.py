"""The engine: coordinates, kernel maps, products. `functional` is its public part."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "functional":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(".functional", __name__)
