"""Acting on a module as soon as it is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any


def when_imported(name: str, action: Callable[[Any], None]) -> Callable[[], None]:
    """Call `action` with the module: now, or when somebody imports it. Returns what gives up waiting."""
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name, self._action = name, action

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        self.leave()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
