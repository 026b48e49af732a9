"""The `optimize` of `enable()`: in force for the process while a framework enabled so is."""

from __future__ import annotations

import contextlib
import sys

from .. import settings
from ..errors import LifecycleError

_chosen: dict[str, str] = {}  # by framework; all the same
_previous: str | None = None  # the setting before the first choice


def enter(value: str | None) -> None:
    """Before a framework is enabled so. Raises LifecycleError where another `enable()` chose otherwise."""
    _check(value)


def _check(value: str | None) -> None:
    for name, other in _chosen.items():
        if value not in (None, other):
            raise LifecycleError(
                f"optimize is {value!r}, but {name} is enabled with optimize={other!r}, which "
                f"counts for all frameworks. Call sparse_bridge.disable({name!r}) first, or leave "
                "it out."
            )


def own_forwards() -> contextlib.AbstractContextManager[None]:
    """In this block classes have their own forward, as patches of it come or go."""
    regions = sys.modules.get("sparse_bridge.core.capture.graph_regions")
    return contextlib.nullcontext() if regions is None else regions.uninstalled()


def chosen(name: str) -> str | None:
    """The choice made for framework `name`; None: there is none."""
    return _chosen.get(name)


def choose(name: str, value: str | None) -> None:
    """Put the choice made for framework `name` in force; None: there is none."""
    global _previous
    _check(value)
    if value is None or name in _chosen:
        return
    if not _chosen:
        _previous = settings.update(optimize=value).optimize
    _chosen[name] = value


def leave(name: str) -> None:
    """Framework `name` is disabled: norms have their own forward again, and with the last
    one that was enabled so, the setting before is in force."""
    global _previous
    deferred = sys.modules.get("sparse_bridge.core.conv.deferred")
    if deferred is not None:
        deferred.reset()
    value = _chosen.pop(name, None)
    if value is None or _chosen:
        return
    if settings.get().optimize == value:  # nobody has changed it since
        settings.update(optimize=_previous)
    _previous = None
