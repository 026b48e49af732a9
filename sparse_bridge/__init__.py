"""Run spconv, torchsparse, MinkowskiEngine and FlexGEMM models unchanged on NVIDIA, AMD and CPU.

    import sparse_bridge
    sparse_bridge.enable()

Importing this package imports neither a framework nor torch nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors, settings
from ._version import __version__
from .names import MissingNameError
from .settings import override as override_settings
from .settings import update as update_settings

if TYPE_CHECKING:
    from . import adapters, core
    from . import compile as compile
    from . import export as export
    from .adapters.convert import convert
    from .adapters.lifecycle import FrameworkStatus, Handle, disable, enable, report, status
    from .checkpointing import checkpoint
    from .core.conv.override import dataflow
    from .hooks import eager
    from .memory import memory_limit
    from .optimization import optimize, restore
    from .tools.profiling.recorder import profile

__all__ = [
    "FrameworkStatus",
    "Handle",
    "__version__",
    "adapters",
    "checkpoint",
    "convert",
    "core",
    "dataflow",
    "disable",
    "eager",
    "enable",
    "errors",
    "memory_limit",
    "optimize",
    "override_settings",
    "profile",
    "report",
    "restore",
    "settings",
    "status",
    "update_settings",
]

_LAZY = {
    "FrameworkStatus": "adapters.lifecycle",
    "Handle": "adapters.lifecycle",
    "checkpoint": "checkpointing",
    "convert": "adapters.convert",
    "dataflow": "core.conv.override",
    "disable": "adapters.lifecycle",
    "eager": "hooks",
    "enable": "adapters.lifecycle",
    "load_ipython_extension": "tools.profiling.notebook",
    "memory_limit": "memory",
    "optimize": "optimization",
    "profile": "tools.profiling.recorder",
    "restore": "optimization",
    "report": "adapters.lifecycle",
    "status": "adapters.lifecycle",
    "unload_ipython_extension": "tools.profiling.notebook",
}


# Not in `__all__`: both need torch, and `compile` would hide Python's own.
_MODULES = ("adapters", "compile", "core", "export", "profiling")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise MissingNameError(__name__, name, __dir__)
    value = getattr(importlib.import_module("." + _LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
