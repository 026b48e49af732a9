"""Further import names of stand-in modules: one module object under several names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec

from ..errors import LifecycleError


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
    root, _, submodule = fullname.partition(".")
    target = aliases.get(root)
    if target is None:
        return None
    if not submodule:
        return ModuleSpec(fullname, _AliasLoader(target))
    parent = sys.modules.get(root)
    if parent is None or parent is not sys.modules.get(target):
        return None
    return ModuleSpec(fullname, _AliasLoader(f"{target}.{submodule}"))


class AliasFinder(importlib.abc.MetaPathFinder):
    """Answers `aliases` after everybody else; main: once this package is imported."""

    def __init__(self, aliases: Mapping[str, str], main: str | None = None) -> None:
        self._aliases, self._main = aliases, main

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if "." in fullname or (self._main is not None and self._main not in sys.modules):
            return None
        return alias_spec(fullname, self._aliases)


class PackageNames(importlib.abc.MetaPathFinder):
    """A package, whoever answers it, under further names: {name: package}. They are answered after
    everybody else, and those that are claimed before everybody else."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._weak = AliasFinder(names)
        self._claimed = Counter[str]()

    def install(self) -> None:
        """Start answering."""
        sys.meta_path.insert(0, self)
        sys.meta_path.append(self._weak)

    def uninstall(self) -> None:
        """Stop answering; the names are gone from `sys.modules`."""
        for finder in (self, self._weak):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if self._answers(name):
                del sys.modules[name]

    @contextlib.contextmanager
    def claimed(self, name: str) -> Iterator[None]:
        """Answer `name` even where a package of that name is installed.

        Raises:
            LifecycleError: that package is imported already.
        """
        self.claim(name)
        try:
            yield
        finally:
            self._claimed[name] -= 1

    def claim(self, *names: str) -> None:
        """The same, until it is uninstalled."""
        for name in names:
            if name in sys.modules and not self._answers(name):
                raise LifecycleError(
                    f"the real {name} is imported already. Call sparse_bridge.enable({name!r}) before its first import."
                )
            self._claimed[name] += 1

    def claims(self) -> list[str]:
        """The names that are claimed."""
        return [name for name in self._names if self._claimed[name] > 0]

    def notes(self) -> list[str]:
        """For `status()`: names that are claimed or in use."""
        used = [name for name in self._names if self._claimed[name] > 0 or self._answers(name)]
        return [f"import {name} is answered as {self._names[name]}" for name in used]

    def _answers(self, name: str) -> bool:
        """Whether a name in `sys.modules` is one of ours, or lies below one."""
        if name.partition(".")[0] not in self._names:
            return False
        module = sys.modules.get(name)
        return module is not None and getattr(module, "__name__", name) != name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """What lies below our names is never looked for where the package itself lies: it would be
        loaded twice."""
        if "." in fullname or self._claimed[fullname] > 0:
            return alias_spec(fullname, self._names)
        return None
