"""The engine: coordinates, kernel maps, products. `functional` is its public part."""

from __future__ import annotations

from ..names import modules_of

# Those that pages name, though nothing has imported them.
__getattr__ = modules_of(__name__, "conv", "functional", "geometry", "ops")
