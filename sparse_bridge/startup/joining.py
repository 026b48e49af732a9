"""Enables frameworks in a child process when they are first imported.

Most processes that a program starts import none, so nothing else is imported before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "sparse_bridge"


class Joining:
    """Finds the frameworks that wait to be enabled.

    state: what `adapters.inherited` has written; `waiting` loses a framework when it is enabled.
    joining: the thread that enables one now.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.waiting: dict[str, dict[str, Any]] = state["frameworks"]
        self.joining: int | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.joining = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package itself from where the program had it; a framework that waits by a loader that
        enables it first."""
        if fullname == _PACKAGE:
            folder = self.state["package"]
            return importlib.util.spec_from_file_location(
                fullname, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
            )
        framework = None if "." in fullname else self._answers(fullname)
        return None if framework is None else ModuleSpec(fullname, _Loader(self, framework))

    def _answers(self, name: str, loosely: bool = False) -> str | None:
        """The framework to enable before a name of its own is looked for.  loosely: as names of
        distributions are compared, without regard to case and signs."""
        wanted = _plain(name) if loosely else name
        for framework, choice in list(self.waiting.items()):
            if wanted in (map(_plain, choice["names"]) if loosely else choice["names"]):
                return None if self._underway(framework) else framework
        return None

    def _underway(self, framework: str) -> bool:
        """Whether this thread enables a framework, or another one that patches what this one gets.
        (To wait for that thread could be to wait for ever: it imports the same.)"""
        patched = self.waiting[framework]["mode"] == "patch"
        return self.joining is not None and (patched or self.joining == threading.get_ident())

    def join(self, framework: str) -> None:
        """Enable a framework.

        Raises: what `enable()` raises; the next import is refused, too.
        """
        before, names = set(sys.modules), self.waiting[framework]["names"]
        try:
            importlib.import_module(f"{_PACKAGE}.adapters.lifecycle").join(framework)
        except BaseException:
            for module in set(sys.modules) - before:
                if module.partition(".")[0] in names:
                    del sys.modules[module]
            raise

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """The metadata of a stand-in that waits to be enabled."""
        name = getattr(context, "name", None)
        framework = self._answers(name, loosely=True) if isinstance(name, str) else None
        if framework is not None and self.waiting[framework]["mode"] == "standin":
            self.join(framework)
            for finder in sys.meta_path[: sys.meta_path.index(self)]:
                yield from getattr(finder, "find_distributions", lambda _: ())(context)


def _plain(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


class _Loader(Loader):
    """Loads a module by having its framework enabled, and imported as ever."""

    def __init__(self, finder: Joining, framework: str) -> None:
        self._finder, self._framework = finder, framework
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._finder.join(self._framework)
        module = importlib.import_module(spec.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which importing has replaced


def begin(state: dict[str, Any]) -> None:
    """Let frameworks be enabled as `state` says."""
    sys.meta_path.insert(0, Joining(state))
