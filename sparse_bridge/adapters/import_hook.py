"""Finding out whether a real framework works, and answering its imports where it does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from ..errors import LifecycleError, UnsupportedError
from ..names import MissingNameError, meant
from .alias_names import AliasFinder, alias_spec
from .base import Framework

_VERSION = re.compile(r"""^__version__\s*(?::\s*str\s*)?=\s*["']([^"']+)["']""", re.MULTILINE)


class StandinLoader(SourceFileLoader):
    """The ordinary loader; its type marks modules that came out of a stand-in tree. A name that such a module lacks
    is answered with one that is spelt like it."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        own = module.__dict__.get("__getattr__")

        def attribute(name: str) -> Any:
            try:
                if own is not None:
                    return own(name)
            except AttributeError as error:
                if type(error) is not AttributeError:  # says what to do
                    raise
            raise MissingNameError(module.__name__, name, lambda: dir(module))

        module.__dict__["__getattr__"] = attribute


def _is_standin(module: object) -> bool:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return isinstance(loader, StandinLoader)


def _names_below(packages: Sequence[str]) -> list[str]:
    """Names in `sys.modules` that are one of `packages` or lie below one."""
    return [name for name in list(sys.modules) if name.partition(".")[0] in packages]


def really_imported(adapter: Framework) -> bool:
    """The real framework, not its stand-in, is imported."""
    module = sys.modules.get(adapter.main)
    return module is not None and not _is_standin(module)


def installed(package: str) -> bool:
    """The real package is found where imports look; whether it works is another matter."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # somebody put a module without a spec under this name
        return True
    # an unrelated folder of that name on sys.path is a namespace package: it has no origin
    if spec is None or spec.origin is None:
        return False
    return not isinstance(spec.loader, StandinLoader)


def import_problem(adapter: Framework) -> str | None:
    """Import the real framework; None when that works, otherwise why not.

    Modules that a failed import leaves behind are removed again, so that a stand-in or a later
    attempt does not meet half a framework.
    """
    package = adapter.packages[0]
    if really_imported(adapter):
        return None
    if not installed(package):
        return f"{package} is not installed"
    loaded = set(_names_below(adapter.packages))
    try:
        importlib.import_module(adapter.main)
    except Exception as error:  # broken builds raise anything, OSError and AssertionError too
        release = _release(adapter)
        for name in _names_below(adapter.packages):
            if name not in loaded:
                sys.modules.pop(name, None)
        if release and isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
            return f"{package} {release} is installed, which has no {error.name} (supported: {adapter.versions})"
        first_line = str(error).strip().partition("\n")[0]
        return f"{package} failed to import: {type(error).__name__}: {first_line}"
    return None


def _release(adapter: Framework) -> str | None:
    """Of an installed framework, which need not import as a whole."""
    if (version := adapter.version()) is not None:
        return version
    try:
        return importlib.metadata.version(adapter.packages[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def choose(adapter: Framework, mode: str) -> tuple[str, str]:
    """("patch" or "standin", why) for a framework that is not enabled; imports it if need be.

    Raises:
        LifecycleError: `mode` cannot be had.
    """
    if mode == "standin":
        if really_imported(adapter):
            where = getattr(sys.modules[adapter.main], "__file__", None) or "an unknown place"
            raise LifecycleError(
                f"mode='standin' for {adapter.name}, but the real {adapter.main} is there already "
                f"(from {where}). Call enable() before its first import, or use mode='patch'."
            )
        return "standin", "mode 'standin' was asked for"
    if not adapter.patchable:
        return _never_patched(adapter, mode)
    was_imported = really_imported(adapter)
    problem = import_problem(adapter)
    if problem is None:
        state = "imported already" if was_imported else "installed and imports"
        return "patch", f"{adapter.packages[0]} is {state}"
    if mode == "patch":
        raise LifecycleError(
            f"mode='patch' for {adapter.name}, but {problem}. Repair the installation "
            f"(supported: {adapter.versions}), or use mode 'auto' or 'standin'."
        )
    return "standin", problem


def _never_patched(adapter: Framework, mode: str) -> tuple[str, str]:
    if really_imported(adapter):
        raise LifecycleError(
            f"{adapter.name} cannot be patched, and the real {adapter.main} is imported already. "
            f"Call sparse_bridge.enable({adapter.name!r}) before the first import of "
            f"{adapter.main}; its stand-in answers then."
        )
    if mode == "patch":
        raise LifecycleError(f"mode='patch' for {adapter.name}, which cannot be patched; use mode='auto' or 'standin'.")
    return "standin", f"{adapter.packages[0]} is always answered by its stand-in"


class StandinFinder(importlib.metadata.DistributionFinder):
    """Answers the packages of one adapter, and everything below them, from its stand-in tree.

    Module objects live as long as the finder: `uninstall` takes them out of `sys.modules` and
    `install` puts the same ones back, so that there is one class object per name.
    """

    def __init__(self, adapter: Framework) -> None:
        self._adapter = adapter
        self._packages = adapter.packages
        self._names = (*adapter.packages, *adapter.aliases)
        self._weak = AliasFinder(adapter.weak_aliases, adapter.packages[0])
        self._root = adapter.standin_root
        self._modules: dict[str, types.ModuleType] = {}
        self._aside: dict[str, types.ModuleType] = {}

    def install(self) -> None:
        """Start answering.

        Real modules found under our names (half a framework, or a companion package) step aside
        until `uninstall`.

        Raises:
            UnsupportedError: the stand-in tree lacks one of the packages.
        """
        for package in self._packages:
            if self._file(package) is None:
                raise UnsupportedError(
                    f"there is no stand-in for {package} in this installation of sparse_bridge; "
                    f"install {package} itself, or leave it out of enable()."
                )
        for name in _names_below(self._names):
            self._aside[name] = sys.modules.pop(name)
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self)
        if self._adapter.weak_aliases:
            sys.meta_path.append(self._weak)

    def uninstall(self) -> None:
        """Stop answering, and leave `sys.modules` as `install` found it."""
        for finder in (self, self._weak):
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for name in _names_below(tuple(self._adapter.weak_aliases)):
            if _is_standin(sys.modules[name]):
                del sys.modules[name]
        for name in _names_below(self._names):
            module = sys.modules[name]
            if not _is_standin(module):
                continue  # put there by somebody else meanwhile: theirs
            del sys.modules[name]
            if not getattr(module.__spec__, "_initializing", False):  # else another thread is in it
                self._modules[name] = module
        for name, module in self._aside.items():
            sys.modules.setdefault(name, module)
        self._aside.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a stand-in module; None for names that are not ours.

        Raises:
            ModuleNotFoundError: ours, but not in the tree. Passing on could reach the real package.
        """
        package = fullname.partition(".")[0]
        if package not in self._packages:
            weak = {} if "." not in fullname else self._adapter.weak_aliases
            return alias_spec(fullname, {**self._adapter.aliases, **weak})
        file = self._file(fullname)
        if file is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r} in sparse_bridge's stand-in for {package}; "
                f"install the real library if you need it.{self._meant(fullname)}",
                name=fullname,
            )
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=StandinLoader(fullname, str(file)),
            submodule_search_locations=[str(file.parent)] if file.name == "__init__.py" else None,
        )

    def _meant(self, fullname: str) -> str:
        """A module beside the one that was asked for."""
        parent, _, name = fullname.rpartition(".")
        folder = self._root.joinpath(*parent.split("."))
        return meant(name, [path.stem for path in folder.glob("*")]) if folder.is_dir() else ""

    def _file(self, fullname: str) -> pathlib.Path | None:
        folder = self._root.joinpath(*fullname.split("."))
        for file in (folder / "__init__.py", folder.with_name(folder.name + ".py")):
            if file.is_file():
                return file
        return None

    def version(self, package: str | None = None) -> str | None:
        """`__version__` of a stand-in package, read without importing it."""
        package = package or self._packages[0]
        version = self._adapter.standin_version(package)
        if version is not None:
            return version
        file = self._file(package)
        match = None if file is None else _VERSION.search(file.read_text(encoding="utf-8"))
        return match and match[1]

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Metadata for stand-in packages whose real distribution is absent.

        Static on purpose: torch lists all distributions while it is being imported.
        """
        requested = None if context is None or context.name is None else _normal(context.name)
        distributed = self._adapter.distributed or self._packages
        for package in distributed:
            if requested not in (None, _normal(package)):
                continue
            version = self._adapter.distribution_version(package) or self.version(package)
            if version is not None and not self._really_distributed(package):
                main = package == self._packages[0]
                others = [other for other in self._packages if main and other not in distributed]
                yield _StandinDistribution(package, version, [package, *others])

    def _really_distributed(self, package: str) -> bool:
        context = importlib.metadata.DistributionFinder.Context(name=package)
        for finder in sys.meta_path:
            find = getattr(finder, "find_distributions", None)
            if find is None or isinstance(finder, StandinFinder):
                continue
            if next(iter(find(context)), None) is not None:
                return True
        return False


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _StandinDistribution(importlib.metadata.Distribution):
    def __init__(self, package: str, version: str, imported: Sequence[str]) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
            "top_level.txt": "\n".join(imported) + "\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> pathlib.Path:
        return pathlib.Path(path)
