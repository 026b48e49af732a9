"""Replacing attributes of a live framework, and putting them back exactly."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any

from ..errors import LifecycleError
from ..log import logger
from .base import Patch

_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class _Applied:
    patch: Patch
    raw: Any  # as the owner's dictionary held it, descriptors included
    owned: bool  # False: inherited, so that undoing deletes
    installed: Any


class PatchSet:
    """Patches that are applied together and undone together, last one first."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = tuple(patches)
        self._applied: list[_Applied] = []

    def apply(self) -> None:
        """Install every patch; does nothing when they are installed.

        Raises:
            LifecycleError: an owner lacks the attribute; patches made so far are undone.
        """
        if self._applied:
            return
        try:
            for patch in self._patches:
                self._applied.append(_install(patch))
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore every original, except where somebody else has replaced ours meanwhile."""
        while self._applied:
            done = self._applied.pop()
            owner, name = done.patch.owner, done.patch.name
            if vars(owner).get(name, _ABSENT) is not done.installed:
                logger.warning(
                    "%s was replaced by other code after sparse_bridge had patched it, so that was "
                    "left alone; if it calls what it replaced, that still runs sparse_bridge. "
                    "Undo such wrappers before disable().",
                    _shown(done.patch),
                )
            elif done.owned:
                setattr(owner, name, done.raw)
            else:
                delattr(owner, name)


def _shown(patch: Patch) -> str:
    owner = patch.owner
    if isinstance(owner, types.ModuleType):
        return f"{owner.__name__}.{patch.name}"
    named = getattr(owner, "__qualname__", type(owner).__qualname__)
    return f"{getattr(owner, '__module__', '?')}.{named}.{patch.name}"


def _install(patch: Patch) -> _Applied:
    owned = patch.name in vars(patch.owner)
    raw = vars(patch.owner).get(patch.name, _ABSENT)
    if not owned:
        raw = inspect.getattr_static(patch.owner, patch.name, _ABSENT)
    if raw is _ABSENT:
        raise LifecycleError(
            f"{_shown(patch)} does not exist, so it cannot be patched ({patch.reason}). The patch "
            f"is meant for versions {patch.versions}; install one of those, or use mode='standin'."
        )
    installed = _replacement(patch, raw)
    setattr(patch.owner, patch.name, installed)
    return _Applied(patch, raw, owned, installed)


def _replacement(patch: Patch, raw: Any) -> Any:
    """The object to install: kind of method and metadata as the original's."""
    method_type = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    original = raw if method_type is None else raw.__func__
    new = patch.replacement(original) if patch.wraps else patch.replacement
    if isinstance(new, types.FunctionType) and callable(original):
        new = _dressed(new, original)
    if method_type is not None and not isinstance(new, method_type):
        new = method_type(new)
    return new


def _dressed(function: types.FunctionType, original: Any) -> types.FunctionType:
    """A copy of `function` under the original's name, doc and signature.

    A copy, because one function may replace several and must not take the name of the last.
    """
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    functools.update_wrapper(copy, original)
    return copy
