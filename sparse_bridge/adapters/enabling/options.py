"""Arguments of `enable()`, and which of them go together."""

from __future__ import annotations

from typing import NamedTuple

from ... import settings
from ...errors import LifecycleError, SettingError, UnsupportedError
from .. import base, ledger


class Wanted(NamedTuple):
    """Arguments of `enable()`; None: as it is, or as settings say."""

    mode: str | None
    strict: bool | None
    profile: str | None
    optimize: str | None


def check(names: tuple[str, ...], wanted: Wanted) -> None:
    """SettingError for a value that an argument cannot have."""
    for name, value in (("mode", wanted.mode), ("optimize", wanted.optimize)):
        allowed = settings.CHOICES[name]
        if value is not None and value not in allowed:
            raise SettingError(
                f"{name} is {value!r}; expected one of {', '.join(allowed)} or None."
            )
    if wanted.strict not in (None, True, False):
        raise SettingError(f"strict is {wanted.strict!r}; expected True, False or None.")
    _check_profile(names, wanted.profile)


def _profiles(name: str) -> tuple[str, ...]:
    try:
        return base.load(name).profiles
    except UnsupportedError:
        return ()


def _check_profile(names: tuple[str, ...], profile: str | None) -> None:
    """SettingError for a profile that none of the frameworks has, or several."""
    if profile is None:
        return
    having = [name for name in names if profile in _profiles(name)]
    if len(having) > 1:
        raise SettingError(
            f"{' and '.join(having)} have a profile {profile!r}; enable them one by one."
        )
    if not having:
        known = [f"{name}: {', '.join(_profiles(name))}" for name in names if _profiles(name)]
        raise SettingError(
            f"profile is {profile!r}; expected one of {'; '.join(known)}."
            if known
            else f"profile is {profile!r}, but {', '.join(names)} has no profiles; leave it out."
        )


def check_same(name: str, mode: str, wanted: Wanted) -> None:
    """LifecycleError for options that differ from those with which a framework is enabled; None and
    "auto" go along with any."""
    wrong = []
    if wanted.mode in ("patch", "standin") and wanted.mode != mode:
        wrong.append(f"mode={wanted.mode!r} (it is {mode!r})")
    if wanted.strict is not None and wanted.strict != ledger.is_strict(name):
        wrong.append(f"strict={wanted.strict} (it is {ledger.is_strict(name)})")
    if wrong:
        raise LifecycleError(
            f"{name} is enabled already with other options than {' and '.join(wrong)}. "
            f"Call sparse_bridge.disable({name!r}) first, or leave the option out."
        )
