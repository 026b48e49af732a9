"""Arguments of `enable()`, and which of them go together."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ... import memory, settings
from ...errors import LifecycleError, SettingError
from ...names import meant
from .. import base, call_stats, optimizing
from ..alias_names import PackageNames
from . import limiting


class EnableOptions(NamedTuple):
    """Arguments of `enable()`; None: as it is, or as settings say."""

    mode: str | None
    strict: bool | None
    profile: str | None
    optimize: str | None
    memory_limit: str | float | None = None


def check(names: tuple[str, ...], requested: EnableOptions) -> None:
    """SettingError for a value that an argument cannot have."""
    for name, value in (("mode", requested.mode), ("optimize", requested.optimize)):
        allowed = settings.CHOICES[name]
        if value is not None and value not in allowed:
            hint = meant(str(value), allowed)
            raise SettingError(f"{name} is {value!r}; expected one of {', '.join(allowed)} or None.{hint}")
    if requested.strict not in (None, True, False):
        raise SettingError(f"strict is {requested.strict!r}; expected True, False or None.")
    if requested.memory_limit is not None:
        memory.size_of(requested.memory_limit)
    base.check_profile(names, requested.profile)


class Enabled(Protocol):
    """A framework that is, and its further import names."""

    adapter: base.Framework
    mode: str
    names: PackageNames


def choice_of(enabled: Enabled) -> dict[str, Any]:
    """How a framework is enabled, for child processes: the options, the names of modules that its
    import begins with, and those of them that are claimed."""
    adapter, mode, names = enabled.adapter, enabled.mode, enabled.names
    name, aliases = adapter.name, tuple(adapter.aliases) if mode == "standin" else ()
    strict = call_stats.chosen_strict(name)
    requested = EnableOptions(mode, strict, adapter.profile(), optimizing.chosen(name), limiting.chosen(name))
    return {
        **requested._asdict(),
        "names": [*adapter.packages, *aliases, *adapter.other_names],
        "claimed": names.claims(),
    }


def check_same(name: str, mode: str, requested: EnableOptions) -> None:
    """LifecycleError for options that differ from those with which a framework is enabled; None and
    "auto" go along with any."""
    wrong = []
    if requested.mode in ("patch", "standin") and requested.mode != mode:
        wrong.append(f"mode={requested.mode!r} (it is {mode!r})")
    if requested.strict is not None and requested.strict != call_stats.is_strict(name):
        wrong.append(f"strict={requested.strict} (it is {call_stats.is_strict(name)})")
    if wrong:
        raise LifecycleError(
            f"{name} is enabled already with other options than {' and '.join(wrong)}. "
            f"Call sparse_bridge.disable({name!r}) first, or leave the option out."
        )
