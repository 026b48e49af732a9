"""Which MinkowskiEngine the process speaks: 0.5 or 0.4. Their names live side by side; the profile
decides where the same call means two things.

Chosen by `enable("minkowski", profile=...)`, the setting `minkowski_profile`, or the version of an
installed MinkowskiEngine. Without a choice it is 0.5, unless a call that only 0.4 takes comes
before the first one that both take and answer differently; afterwards it stays.
"""

from __future__ import annotations

import re
import threading

from ...log import logger
from ..base import refuse_profile
from ..enabling import inherited

VERSIONS = {"0.5": "0.5.4", "0.4": "0.4.3"}
_DEFAULT = "0.5"

_lock = threading.Lock()
_chosen: str | None = None
_reason = ""
_settled = False


def of_version(version: str) -> str | None:
    """The profile of a MinkowskiEngine version; None for releases that have none."""
    name = ".".join(re.findall(r"\d+", version)[:2])
    return name if name in VERSIONS else None


def choose(name: str | None, reason: str) -> None:
    """Start with profile `name`; None: the default, open to correction until something depends on
    it."""
    global _chosen, _reason, _settled
    with _lock:
        _chosen, _reason, _settled = name, reason, name is not None


def confirm(name: str) -> None:
    """A second `enable()` names a profile. Raises LifecycleError when another one is in force."""
    global _chosen, _reason, _settled
    with _lock:
        refuse_profile("minkowski", _chosen or _DEFAULT, name)
        _chosen, _settled = name, True
        _reason = _reason or f"enable(profile={name!r})"


def version() -> str:
    """`__version__` of the stand-in, as things stand."""
    return VERSIONS[_chosen or _DEFAULT]


def is_old() -> bool:
    """Whether 0.4's rules hold, for work whose result depends on it: settled from now on."""
    global _settled
    if not _settled:
        _settled = True
    return _chosen == "0.4"


def seems_old() -> bool:
    """`is_old` as things stand; nothing is settled."""
    return _chosen == "0.4"


def saw_old(call: str) -> None:
    """`call` is one that only 0.4 takes: where nothing was chosen or settled, that decides."""
    global _chosen, _reason, _settled
    if _settled:
        return
    with _lock:
        if _settled:
            return
        _chosen, _reason, _settled = "0.4", f"detected: {call}", True
    inherited.renew()
    logger.warning(
        "MinkowskiEngine profile 0.4 was detected (%s). Set it with enable('minkowski', "
        "profile='0.4') or SPARSE_BRIDGE_ENABLE=minkowski_profile=0.4, so that worker processes "
        "agree; profile='0.5' keeps the rules of 0.5.",
        call,
    )


def in_force() -> str | None:
    """The profile; None while it is open to correction."""
    return (_chosen or _DEFAULT) if _settled else _chosen


def describe() -> str:
    """One line for `status()`."""
    reason = _reason or "default"
    if not _settled:
        reason += "; a call that only 0.4 takes changes it"
    return f"profile {_chosen or _DEFAULT} ({reason})"
