"""One record per framework: its names, its stand-in tree, its patches, and where its tensors are
read.

Nothing here imports a framework or torch; records are found by name and loaded at first use.
Life cycle, conversion, fusion, replay and the compatibility matrix read them, and name no
framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.closed_world import origins
from ..errors import LifecycleError, SettingError, UnsupportedError
from ..names import meant


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
    notes: remarks of the adapter, such as the version profile in force.  imported: whether this
    process has imported it.
    """

    framework: str
    enabled: bool
    mode: str | None
    version: str | None
    reason: str
    dataflow: str
    device: str
    notes: tuple[str, ...] = ()
    imported: bool = True


class Framework:
    """What the bridge knows of one framework; each adapter has one, `ADAPTER`.

    name: the name given to `enable()`.  title: as its users write it.
    packages: top-level import names that the stand-in answers; the framework's own comes first.
    distributed: those of them under whose name the framework is installed; (): all.
    main: the import that proves that the real framework works.
    standin_root: folder that mirrors upstream's module names, `<root>/<package>/__init__.py` first.
    tensor: (module, class) of its sparse tensor.
    versions: supported upstream versions, for humans.
    profiles: releases with different conventions, one of which `enable(profile=...)` may choose.
    patchable: False where the real framework cannot be patched; its stand-in always answers then.
    aliases: further top-level names of stand-in modules, {alias: module}.
    weak_aliases: the same for names that others use too: answered where nobody else does.
    other_names: further names of whole packages, patched or not, {name: package}: answered where
        nobody else does, and always where `enable()` is given that name (see `OTHER_NAMES`).
    """

    name: str
    title: str = ""
    packages: tuple[str, ...]
    distributed: tuple[str, ...] = ()
    main: str
    tensor: tuple[str, str] = ("", "")
    standin_root: pathlib.Path
    versions: str
    profiles: tuple[str, ...] = ()
    patchable: bool = True
    aliases: Mapping[str, str] = types.MappingProxyType({})
    weak_aliases: Mapping[str, str] = types.MappingProxyType({})
    other_names: Mapping[str, str] = types.MappingProxyType({})

    def patches(self) -> list[Patch]:
        """The patches for the real framework, which is imported by now: those of the adapter's
        `patch.py`.

        Raises:
            UnsupportedError: the installed version is outside `versions`.
        """
        result: list[Patch] = self.part("patch").patches()
        return result

    def part(self, name: str) -> Any:
        """A file of the adapter, at first use."""
        return importlib.import_module(f"{type(self).__module__}.{name}")

    def standin_patches(self) -> list[Patch]:
        """Patches outside the framework that its stand-in needs, for instance of torch's own
        modules."""
        return []

    def standin_version(self, package: str) -> str | None:
        """`__version__` of a stand-in package, where it is not written in the package itself."""
        return None

    def distribution_version(self, package: str) -> str | None:
        """The version in a stand-in's metadata, where it is not that of `__version__`."""
        return None

    def begin(self, mode: str, profile: str | None) -> None:
        """Called once when the framework is enabled, before anything is patched or answered.

        mode: "patch" or "standin".  profile: what `enable()` asked for, one of `profiles`.
        Raises LifecycleError when the installed framework contradicts `profile`.
        """

    def confirm(self, profile: str) -> None:
        """`enable()` names a profile while the framework is enabled already: LifecycleError when it
        differs. Asks the adapter's `profile.py`."""
        if self.profiles:
            self.part("profile").confirm(profile)

    def profile(self) -> str | None:
        """The profile in force; None: there is none, or it is open to correction."""
        in_force: str | None = self.part("profile").in_force() if self.profiles else None
        return in_force

    def version(self) -> str | None:
        """Version of the imported framework, real or stand-in; None when it is not imported."""
        return getattr(sys.modules.get(self.packages[0]), "__version__", None)

    def notes(self) -> list[str]:
        """Remarks for `status()` and `doctor`: the profile in force, and how it was chosen."""
        return [self.part("profile").describe()] if self.profiles else []

    def register_operators(self) -> None:
        """Register what the adapter adds to `torch.ops`: `compiled.py`, where it has one."""
        name = type(self).__module__ + ".compiled"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)

    def tensor_class(self) -> type | None:
        """The class of its sparse tensors, real or stand-in; None while nothing has imported it."""
        tensor_class = getattr(sys.modules.get(self.tensor[0]), self.tensor[1], None)
        return tensor_class if isinstance(tensor_class, type) else None

    def takes(self, x: Any) -> bool:
        """Whether its functions take this as a sparse tensor."""
        tensor_class = self.tensor_class()
        return tensor_class is not None and isinstance(x, tensor_class)


def interchange_of(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of an adapter's package: `to_core` and `from_core` of its `interchange.py`
    at first use, because they need torch."""

    def attribute(name: str) -> Any:
        if name not in ("from_core", "to_core"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.interchange"), name)

    return attribute


def choose_profile(
    choose: Callable[[str | None, str], None],
    requested: str | None,
    configured: str,
    installed: Callable[[], tuple[str | None, str]],
) -> None:
    """Start with a profile: the one that `enable()` asked for, the setting's, or that of an
    installed release as `installed` tells it and why."""
    if requested is not None:
        choose(requested, f"enable(profile={requested!r})")
    elif configured != "auto":
        choose(configured, "SPARSE_BRIDGE_ENABLE")
    else:
        choose(*installed())


def refuse_profile(framework: str, now: str, requested: str) -> None:
    """Raises LifecycleError unless the profile in force is the requested one."""
    if requested != now:
        raise LifecycleError(
            f"{framework} is enabled already with profile {now!r}, not {requested!r}. Call "
            f"sparse_bridge.disable({framework!r}) first, or leave the option out."
        )


# "module:attribute" of each adapter, so that a name is known before its module is imported.
ADAPTERS: dict[str, str] = {
    "spconv": "sparse_bridge.adapters.spconv:ADAPTER",
    "torchsparse": "sparse_bridge.adapters.torchsparse:ADAPTER",
    "minkowski": "sparse_bridge.adapters.minkowski:ADAPTER",
    "flex_gemm": "sparse_bridge.adapters.flex_gemm:ADAPTER",
}

# The same for frameworks that `enable()` bridges only where they are named.
BY_NAME: dict[str, str] = {"torch_geometric": "sparse_bridge.adapters.torch_geometric:ADAPTER"}

# Import names of other packages that a framework answers, by which it may be enabled, too.
OTHER_NAMES: Mapping[str, str] = types.MappingProxyType({"spconv_triton": "spconv"})

# Import names that are not the framework's name here.
IMPORT_NAMES: Mapping[str, str] = types.MappingProxyType({"MinkowskiEngine": "minkowski"})

_loaded: dict[str, Framework] = {}
_lock = threading.Lock()


def name_of(name: str) -> str:
    """The name here of a framework that may be given by an import name."""
    return {**OTHER_NAMES, **IMPORT_NAMES}.get(name, name)


def load(name: str) -> Framework:
    """The record of framework `name`, or of the one that answers this import name.

    Raises:
        SettingError: no adapter has that name.
        UnsupportedError: the adapter is registered but not part of this installation.
    """
    if not isinstance(name, str) or "," in name:
        raise SettingError(f"framework {name!r}; expected names, as in enable('spconv', 'torchsparse').")
    name = name_of(name)
    with _lock:
        if name in _loaded:
            return _loaded[name]
        targets = {**BY_NAME, **ADAPTERS}
        if name not in targets:
            names = sorted((*targets, *OTHER_NAMES))
            raise SettingError(
                f"framework {name!r} is unknown; expected one of {', '.join(names)}."
                f"{meant(name, (*names, *IMPORT_NAMES))}"
            )
        target = targets[name]
    adapter = _import_adapter(name, target)
    origins.trust(adapter.packages)
    with _lock:
        return _loaded.setdefault(name, adapter)


def _profiles(name: str) -> tuple[str, ...]:
    try:
        return load(name).profiles
    except UnsupportedError:
        return ()


def check_profile(names: tuple[str, ...], profile: str | None) -> None:
    """Raises SettingError for a profile that none of the frameworks has, or several."""
    if profile is None:
        return
    if not isinstance(profile, str):
        raise SettingError(
            f"profile is {profile!r}, a {type(profile).__name__}; give it as text, profile={str(profile)!r}."
        )
    having = [name for name in names if profile in _profiles(name)]
    if len(having) > 1:
        raise SettingError(f"{' and '.join(having)} have a profile {profile!r}; enable them one by one.")
    if not having:
        available = [f"{name}: {', '.join(_profiles(name))}" for name in names if _profiles(name)]
        raise SettingError(
            f"profile is {profile!r}; expected one of {'; '.join(available)}."
            if available
            else f"profile is {profile!r}, but {', '.join(names)} has no profiles; leave it out."
        )


def frameworks() -> Iterator[Framework]:
    """The records of all adapters that are part of this installation."""
    for name in tuple(ADAPTERS):
        with contextlib.suppress(UnsupportedError):
            yield load(name)


def capture(name: str) -> types.ModuleType:
    """Module `name` of `core.capture`, which captures models as graphs.

    Nothing else in the package knows that folder, and all but replays works without it.  Raises UnsupportedError
    where this installation lacks it.
    """
    return _optional(f"sparse_bridge.core.capture.{name}", "models run without captured graphs (graphs=False)")


def prefetch() -> types.ModuleType:
    """Module `core.prefetch.prefetch`. Of the engine only `core.capture` knows that folder. Raises UnsupportedError
    where this installation lacks it."""
    return _optional("sparse_bridge.core.prefetch.prefetch", "kernel maps are built when layers ask for them")


def _optional(name: str, instead: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UnsupportedError(f"{name} is not part of this installation of sparse_bridge; {instead}.") from None


def _import_adapter(name: str, target: str) -> Framework:
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


def register_for_testing(adapter: Framework) -> None:
    """Make `adapter` known under its name; for tests with invented frameworks."""
    with _lock:
        ADAPTERS[adapter.name] = f"{type(adapter).__module__}:{type(adapter).__qualname__}"
        _loaded[adapter.name] = adapter
