"""`enable()` and `disable()`: how frameworks come to be answered by the bridge, and cease to be.

A framework that imports is patched; one that is missing or broken is answered by its stand-in.
Enabling holds a framework: it stays enabled until every holder has let go, or until `disable()`.
Processes started by fork inherit the state; those started by spawn run the main module's top
level, so call `enable()` there rather than under `if __name__ == "__main__"`. Children of a program
under `python -m sparse_bridge run` inherit it in any case (`enabling.inherited`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import releases, settings
from ..errors import LifecycleError, UnsupportedError
from ..log import logger
from . import base, call_stats, layer_device, optimizing
from .alias_names import PackageNames
from .base import Framework, FrameworkStatus
from .enabling import child_counts, compiling, forks, inherited, limiting, model_layers, options
from .enabling.active import Active
from .enabling.options import EnableOptions
from .import_hook import StandinFinder, choose, really_imported
from .patching import PatchSet

__all__ = ["FrameworkStatus", "Handle", "disable", "enable", "report", "status"]


_lock = threading.RLock()
_active: dict[str, Active] = {}
_left_out: dict[str, str] = {}  # why an enable() of everything passed a framework over
# By stand-in tree; kept: they own the stand-ins' module objects.
_finders: dict[tuple[str, Path], StandinFinder] = {}


def _renew_lock() -> None:
    """A fork may happen while another thread enables; the child has no such thread to release."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=forks.end_threads, after_in_child=_renew_lock)


class Handle:
    """What one `enable()` holds. As a context manager it lets go at the end of the block."""

    def __init__(self, active: tuple[Active, ...], claims: contextlib.ExitStack, baseline: call_stats.Tally) -> None:
        self._frameworks = active
        self._claims = claims
        self._released = False
        self._baseline = baseline
        self._final: call_stats.Tally | None = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        names = ", ".join(f"{active.adapter.name}: {active.mode}" for active in self._frameworks)
        return f"<sparse_bridge.Handle {names}{' (disabled)' if self._released else ''}>"

    def disable(self) -> None:
        """Undo what this `enable()` added; frameworks that others still hold stay enabled."""
        with _lock:
            if self._released or sys.is_finalizing():  # when imports are gone
                return
            self._released = True
            self._final = call_stats.snapshot()
            self._claims.close()
            for active in reversed(self._frameworks):
                _let_go(active)

    def status(self) -> dict[str, FrameworkStatus]:
        """Status of this handle's frameworks, as long as it holds them."""
        with _lock:
            names = [active.adapter.name for active in self._frameworks]
            return call_stats.Statuses({name: _describe(name) for name in names})

    def report(self) -> call_stats.Report:
        """Layers that ran while this handle was held, and how its frameworks were answered."""
        tally = call_stats.since(self._baseline, self._final)
        names = [active.adapter.name for active in self._frameworks]
        layers = {name: counts for name, counts in call_stats.counts(tally).items() if name in names}
        with _lock:
            described = tuple(_described(active) for active in self._frameworks)
        return call_stats.Report(described, layers)


def enable(
    *frameworks: str,
    mode: str | None = None,
    strict: bool | None = None,
    profile: str | None = None,
    optimize: str | None = None,
    memory_limit: str | float | None = None,
) -> Handle:
    """Bridge `frameworks` ("spconv", ...); without names, all that this installation knows.

    Args:
        mode: "patch" keeps the real framework and replaces what its layers compute; "standin"
            answers its imports; "auto" patches what imports and stands in for the rest.
            None: the setting.
        strict: raise where a layer would be left to the original framework. None: the setting.
        profile: the release whose conventions are meant, for frameworks that changed theirs
            (torchsparse: "2.1", "2.0", "1.4"; minkowski: "0.5", "0.4"; flex_gemm: "1", "2.0").
            None: by the framework.
        optimize: what is done to models as they run, of all frameworks, as long as one that was
            enabled so is. "off": nothing; "fuse": in inference norms, activations and residual sums
            join the convolutions before them; "auto", the default: on an NVIDIA GPU, parts of models that
            take and return sparse tensors are also captured as graphs of launches and replayed, in inference
            and in training (on AMD GPUs with SPARSE_BRIDGE_CAPTURE=always alone); "graphs": the same, with a
            warning about what is not replayed; "inference": calls without gradients alone. None: the setting.
        memory_limit: as `sparse_bridge.memory_limit`, as long as what is enabled here is.

    Warns once where this Python, torch or Triton is none that the package was tested with, and of environment variables
    `SPARSE_BRIDGE_...` that are no settings.

    Returns:
        A handle with `report()`, `status()` and `disable()`, usable as a context manager.

    Raises:
        SettingError: an unknown framework, mode, profile or optimize, or no size.
        UnsupportedError: the adapter, its stand-in or the installed version is not supported.
        LifecycleError: `mode` or `profile` cannot be had, or contradicts how the framework is
            enabled already, as `memory_limit` may, too, and `optimize` how any is.
    """
    names = tuple(dict.fromkeys(base.load(name).name for name in frameworks) or base.ADAPTERS)
    requested = EnableOptions(mode, strict, profile, optimize, memory_limit)
    options.check(names, requested)
    releases.warn()
    settings.warn_of_unknown_variables()
    with _lock:
        for name in names:
            join(name)
        baseline = call_stats.snapshot()
        active: list[Active] = []
        claims = contextlib.ExitStack()
        try:
            for name in names:
                if frameworks:
                    active.append(_hold(name, requested))
                else:
                    active.extend(_hold_if_possible(name, requested))
            for name in base.OTHER_NAMES.keys() & frameworks:
                claims.enter_context(_active[base.OTHER_NAMES[name]].names.claimed(name))
        except BaseException:
            claims.close()
            for enabled in reversed(active):
                _let_go(enabled)
            raise
        if not active:
            reasons = "; ".join(f"{name}: {reason.rstrip('.')}" for name, reason in _left_out.items())
            raise LifecycleError(f"enable() found no framework that it can bridge ({reasons}).")
        inherited.renew()
        return Handle(tuple(active), claims, baseline)


def disable(*frameworks: str) -> None:
    """Turn `frameworks` off, all enabled ones without names, whoever holds them. Raises SettingError for an unknown
    framework."""
    names = [base.load(name).name for name in frameworks]
    with _lock:
        waiting = inherited.waiting()
        for name in names or (*waiting, *reversed(_active)):
            waiting.pop(name, None)
            if name in _active:
                _deactivate(_active[name])
        inherited.renew()


def join(name: str) -> None:
    """In a child process of `run`, enable a framework as the program had it, unless that is done.

    Raises: what `enable()` raises.
    """
    with _lock:
        choice = inherited.waiting().get(name)
        if choice is None:
            return
        with inherited.joining():
            active = _hold(name, EnableOptions(*(choice[field] for field in EnableOptions._fields)))
        active.names.claim(*choice["claimed"])
        del inherited.waiting()[name]


def hand_on(counts: str = "") -> None:
    """Have child processes enable what is enabled here, and write the calls of their layers to the
    folder `counts`; "": nowhere."""
    inherited.hand_on(_choices, counts)
    child_counts.expect(counts)


def _choices() -> inherited.Choices:
    """How frameworks are enabled, for child processes."""
    own = {name: options.choice_of(active) for name, active in list(_active.items())}
    return {**inherited.waiting(), **own}


def status() -> dict[str, FrameworkStatus]:
    """How each known framework is answered now."""
    with _lock:
        for name in tuple(inherited.waiting()):
            join(name)
        names = dict.fromkeys((*base.ADAPTERS, *_active))
        return call_stats.Statuses({name: _describe(name) for name in names})


def report(model: Any = None) -> call_stats.Report:
    """Layers that ran in this process, how the enabled frameworks are answered, and of a torch
    module its sparse layers, with the times and memory that a profile of it has measured."""
    with _lock:
        described = tuple(map(_described, _active.values()))
    return call_stats.Report(described, call_stats.counts(), modules=model_layers.modules_of(model))


def _hold(name: str, requested: EnableOptions) -> Active:
    active = _active.get(name)
    adapter = base.load(name)
    if requested.profile not in adapter.profiles:
        requested = requested._replace(profile=None)
    if active is None:
        active = _activate(adapter, requested)
    else:
        options.check_same(name, active.mode, requested)
        if requested.profile is not None:
            adapter.confirm(requested.profile)
        optimizing.choose(name, requested.optimize)
        limiting.choose(name, requested.memory_limit)
    active.holders += 1
    return active


def _hold_if_possible(name: str, requested: EnableOptions) -> list[Active]:
    """As `_hold`, but a framework out of reach is passed over, and `status()` says why.

    Never where the real framework is imported: it would run unbridged without a word.
    """
    adapter = None
    try:
        adapter = base.load(name)
        return [_hold(name, requested)]
    except (LifecycleError, UnsupportedError) as error:
        if name in _active or (adapter is not None and really_imported(adapter)):
            raise
        _left_out[name] = str(error)
        logger.warning("%s is not bridged: %s", name, error)
        return []


def _activate(adapter: Framework, requested: EnableOptions) -> Active:
    name = adapter.name
    optimizing.enter(requested.optimize)
    chosen, reason = choose(adapter, requested.mode or settings.get().mode)
    adapter.begin(chosen, requested.profile)
    with optimizing.own_forwards():
        undo, version = _start(adapter, chosen)
    compiling.install()
    names = PackageNames(adapter.other_names)
    names.install()
    call_stats.set_strict(name, requested.strict)
    optimizing.choose(name, requested.optimize)
    limiting.choose(name, requested.memory_limit)
    _left_out.pop(name, None)
    _active[name] = active = Active(adapter, chosen, reason, version, names, undo)
    logger.info("%s is bridged, mode %s (%s)", name, chosen, reason)
    return active


def _start(adapter: Framework, mode: str) -> tuple[Callable[[], None], str | None]:
    """Patch, or answer imports: (how to undo it, version of what answers)."""
    patches = PatchSet(adapter.patches() if mode == "patch" else adapter.standin_patches())
    patches.apply()
    if mode == "patch":
        return patches.undo, adapter.version()
    finder = _finders.setdefault((adapter.name, adapter.standin_root), StandinFinder(adapter))
    try:
        finder.install()
    except BaseException:
        patches.undo()
        raise

    def stop() -> None:
        finder.uninstall()
        patches.undo()

    return stop, finder.version()


def _let_go(active: Active) -> None:
    active.holders -= 1
    if active.holders <= 0:
        _deactivate(active)


def _deactivate(active: Active) -> None:
    """Undo, unless `disable()` has done so before a handle let go."""
    name = active.adapter.name
    if _active.get(name) is active:
        del _active[name]
        call_stats.set_strict(name, None)
        optimizing.leave(name)
        active.was_imported = active.imported
        active.names.uninstall()
        with optimizing.own_forwards():
            active.undo()
        compiling.remove()
        logger.info("%s is no longer bridged", name)
        limiting.leave(name)  # which may warn, and a warning may be an error


def _describe(name: str) -> FrameworkStatus:
    if name in _active:
        return _described(_active[name])
    reason = _left_out.get(name, "no enable() holds it")
    return FrameworkStatus(name, False, None, None, reason, *layer_device.of_layers(), imported=False)


def _described(active: Active) -> FrameworkStatus:
    """The status of a framework as enabled by `active`, still or formerly."""
    adapter = active.adapter
    enabled = _active.get(adapter.name) is active
    version = active.version or adapter.version()
    if active.mode == "standin":  # a profile may have been detected since
        version = adapter.standin_version(adapter.packages[0]) or version
    return FrameworkStatus(
        adapter.name,
        enabled,
        active.mode,
        version,
        active.reason,
        *layer_device.of_layers(),
        (*adapter.notes(), *active.names.notes(), *layer_device.mistrusted()),
        active.imported,
    )


if inherited.finder() is not None:  # this process is a child, and may have children
    hand_on(inherited.finder().state["counts"])
    child_counts.keep(inherited.finder().state["counts"])
