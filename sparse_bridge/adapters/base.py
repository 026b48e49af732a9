"""What one framework tells the life cycle: its names, its stand-in tree and its patches.

Nothing here imports a framework or torch; adapters are found by name and loaded at first use.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import pathlib
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

from ..errors import SettingError, UnsupportedError

__all__ = ["ADAPTERS", "Adapter", "FrameworkStatus", "Patch", "load"]


@dataclasses.dataclass(frozen=True)
class Patch:
    """One attribute of the real framework that is replaced while the bridge is enabled.

    owner: the class or module whose attribute `name` is looked up at call time.
    replacement: the new attribute; with `wraps=True` a factory that takes the original (the plain
        function also where the owner holds a staticmethod or classmethod) and returns the new one.
        An inherited original is what the owner inherits at that moment, so list a subclass before a
        base that is patched too.
    reason: why the patch exists.  versions: framework versions it was written for.
    """

    owner: Any
    name: str
    replacement: Any
    reason: str
    versions: str
    wraps: bool = False


@dataclasses.dataclass(frozen=True)
class FrameworkStatus:
    """How one framework is answered now.

    mode: "patch", "standin" or None when never enabled.  version: of whatever answers its imports.
    reason: why this mode (or why not enabled).  device, dataflow: where layers run by default.
    notes: remarks of the adapter, such as the version profile in force.
    """

    framework: str
    enabled: bool
    mode: str | None
    version: str | None
    reason: str
    dataflow: str
    device: str
    notes: tuple[str, ...] = ()


class Adapter(abc.ABC):
    """Base of every framework adapter.

    name: the name given to `enable()`.
    packages: top-level import names that the stand-in answers; the framework's own comes first.
    main: the import that proves that the real framework works.
    standin_root: folder that mirrors upstream's module names, `<root>/<package>/__init__.py` first.
    versions: supported upstream versions, for humans.
    profiles: releases with different conventions, one of which `enable(profile=...)` may choose.
    patchable: False where the real framework cannot be patched; its stand-in always answers then.
    aliases: further top-level names of stand-in modules, {alias: module}.
    weak_aliases: the same for names that others use too: answered where nobody else does.
    """

    name: str
    packages: tuple[str, ...]
    main: str
    standin_root: pathlib.Path
    versions: str
    profiles: tuple[str, ...] = ()
    patchable: bool = True
    aliases: Mapping[str, str] = types.MappingProxyType({})
    weak_aliases: Mapping[str, str] = types.MappingProxyType({})

    @abc.abstractmethod
    def patches(self) -> list[Patch]:
        """The patches for the real framework, which is imported by now.

        Raises:
            UnsupportedError: the installed version is outside `versions`.
        """

    def standin_patches(self) -> list[Patch]:
        """Patches outside the framework that its stand-in needs, for instance of torch's own
        modules."""
        return []

    def standin_version(self, package: str) -> str | None:
        """`__version__` of a stand-in package, where it is not written in the package itself."""
        return None

    def begin(self, mode: str, profile: str | None) -> None:  # noqa: B027
        """Called once when the framework is enabled, before anything is patched or answered.

        mode: "patch" or "standin".  profile: what `enable()` asked for, one of `profiles`.
        Raises LifecycleError when the installed framework contradicts `profile`.
        """

    def confirm(self, profile: str) -> None:  # noqa: B027
        """`enable()` names a profile while the framework is enabled already: LifecycleError when it
        differs."""

    def version(self) -> str | None:
        """Version of the imported framework, real or stand-in; None when it is not imported."""
        return getattr(sys.modules.get(self.packages[0]), "__version__", None)

    def notes(self) -> list[str]:
        """Remarks for `status()` and `doctor`, such as the version profile in force."""
        return []


# "module:attribute" of each adapter, so that a name is known before its module is imported.
ADAPTERS: dict[str, str] = {
    "spconv": "sparse_bridge.adapters.spconv:ADAPTER",
    "torchsparse": "sparse_bridge.adapters.torchsparse:ADAPTER",
    "minkowski": "sparse_bridge.adapters.minkowski:ADAPTER",
}

_loaded: dict[str, Adapter] = {}
_lock = threading.Lock()


def load(name: str) -> Adapter:
    """The adapter of framework `name`.

    Raises:
        SettingError: no adapter has that name.
        UnsupportedError: the adapter is registered but not part of this installation.
    """
    with _lock:
        if name in _loaded:
            return _loaded[name]
        if name not in ADAPTERS:
            raise SettingError(
                f"framework {name!r} is unknown; expected one of {', '.join(sorted(ADAPTERS))}."
            )
        target = ADAPTERS[name]
    adapter = _import_adapter(name, target)
    with _lock:
        return _loaded.setdefault(name, adapter)


def _import_adapter(name: str, target: str) -> Adapter:
    module_name, _, attribute = target.partition(":")
    refusal = UnsupportedError(
        f"the adapter of {name} ({target}) is not part of this installation of sparse_bridge; "
        f"leave {name} out of enable(), or install a release that has it."
    )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise refusal from None
        raise  # the adapter exists, something that it needs does not
    if not hasattr(module, attribute):
        raise refusal
    return getattr(module, attribute)


def register_for_testing(adapter: Adapter) -> None:
    """Make `adapter` known under its name; for tests with invented frameworks."""
    with _lock:
        ADAPTERS[adapter.name] = f"{type(adapter).__module__}:{type(adapter).__qualname__}"
        _loaded[adapter.name] = adapter
