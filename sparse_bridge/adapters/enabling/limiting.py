"""The `memory_limit` of `enable()`: in force for the process while a framework enabled so is."""

from __future__ import annotations

import atexit

from ... import memory
from ...errors import LifecycleError
from ...memory import memory_limit, size_of

_limits: dict[str, memory_limit] = {}  # by framework


def chosen(name: str) -> int | None:
    """The limit with which framework `name` was enabled, in bytes."""
    return _limits[name].limit if name in _limits else None


def choose(name: str, value: str | float | None) -> None:
    """Put the limit with which framework `name` is enabled in force; None: any.

    Raises: LifecycleError where it is enabled with another one.
    """
    if value is None or size_of(value) == chosen(name):
        return
    if name in _limits:
        raise LifecycleError(
            f"memory_limit is {value!r}, but {name} is enabled with memory_limit={chosen(name)}. "
            f"Call sparse_bridge.disable({name!r}) first, or leave it out; for a part of a program "
            "use `with sparse_bridge.memory_limit(...)`."
        )
    if not _limits:
        atexit.register(leave_all)
    _limits[name] = memory_limit(value).__enter__()


def leave(name: str) -> None:
    """Framework `name` is disabled."""
    limit = _limits.pop(name, None)
    if not _limits:
        atexit.unregister(leave_all)
    if limit is not None:
        memory.leave(limit)


def leave_all() -> None:
    """The process ends: say what no layer has said."""
    for name in list(_limits):
        leave(name)
