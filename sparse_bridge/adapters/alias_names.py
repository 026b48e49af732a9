"""Further import names of stand-in modules: one module object under several names."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec


class _AliasLoader(importlib.abc.Loader):
    """Loads a name by putting another module under it."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system returns what stands under the name afterwards.
        sys.modules[module.__name__] = importlib.import_module(self._target)


def alias_spec(fullname: str, aliases: Mapping[str, str]) -> ModuleSpec | None:
    """Spec of a top-level alias, or of a module below one that is in use; None for other names."""
    root, _, rest = fullname.partition(".")
    target = aliases.get(root)
    if target is None:
        return None
    if not rest:
        return ModuleSpec(fullname, _AliasLoader(target))
    parent = sys.modules.get(root)
    if parent is None or parent is not sys.modules.get(target):
        return None
    return ModuleSpec(fullname, _AliasLoader(f"{target}.{rest}"))


class AliasFinder(importlib.abc.MetaPathFinder):
    """Answers `aliases` after everybody else, once the package `main` is imported."""

    def __init__(self, aliases: Mapping[str, str], main: str) -> None:
        self._aliases, self._main = aliases, main

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if "." in fullname or self._main not in sys.modules:
            return None
        return alias_spec(fullname, self._aliases)
