"""Which torchsparse the process speaks: 2.1, 2.0 or 1.4. They differ in coordinate layout and
signatures.

Chosen by `enable("torchsparse", profile=...)`, the setting `torchsparse_profile`, or the version of
an installed torchsparse. Without a choice it is 2.1, unless the first thing that tells the releases
apart is a call that only the older ones take; afterwards it stays.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from typing import Any

from ...log import logger, warn
from ..base import refuse_profile
from ..enabling import inherited
from .errors import SignatureError

__all__ = [
    "PROFILES",
    "Profile",
    "bind",
    "choose",
    "confirm",
    "current",
    "describe",
    "in_force",
    "of_version",
    "peek",
    "saw_old_name",
    "saw_old_signature",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """A release's conventions.

    version: its `__version__`.  batch_first: coordinate rows are [b, x, y, z], else [x, y, z, b].
    divides: a strided layer's outputs are indices of the coarse grid, else multiples of the tensor
    stride.
    """

    name: str
    version: str
    batch_first: bool
    divides: bool

    @property
    def batch_column(self) -> int:
        return 0 if self.batch_first else 3

    @property
    def first_axis(self) -> int:
        """Column of x."""
        return 1 if self.batch_first else 0


PROFILES = {
    "2.1": Profile("2.1", "2.1.0", True, True),
    "2.0": Profile("2.0", "2.0.0b", False, False),
    "1.4": Profile("1.4", "1.4.0", False, False),
}
_DEFAULT = "2.1"
_OLD = "1.4"

_lock = threading.Lock()
_chosen: str | None = None
_reason = ""
settled: Profile | None = None  # the one that results depend on; None: still open to correction


def of_version(version: str) -> str | None:
    """The profile of a torchsparse version; None for releases that have none."""
    numbers = re.findall(r"\d+", version)[:2]
    name = ".".join(numbers)
    return name if name in PROFILES else None


def choose(name: str | None, reason: str) -> None:
    """Start with profile `name`; None: the default, open to correction until something depends on
    it."""
    global _chosen, _reason, settled
    with _lock:
        _chosen, _reason = name, reason
        settled = None if name is None else PROFILES[name]


def confirm(name: str) -> None:
    """A second `enable()` names a profile. Raises LifecycleError when another one is in force."""
    global _chosen, _reason, settled
    with _lock:
        refuse_profile("torchsparse", _chosen or _DEFAULT, name)
        if settled is None:
            _chosen, _reason, settled = name, f"enable(profile={name!r})", PROFILES[name]


def peek() -> Profile:
    """The profile as things stand, without settling it."""
    return PROFILES[_chosen or _DEFAULT]


def current() -> Profile:
    """The profile, for work whose result depends on it: settled from now on."""
    global settled
    if settled is not None:
        return settled
    import torch

    if torch.compiler.is_compiling():  # compilers follow no locks; a guard watches what is read
        return peek()
    with _lock:
        if settled is None:
            settled = PROFILES[_chosen or _DEFAULT]
        return settled


def saw_old_signature(call: str) -> Profile:
    """`call` is one that only the signatures of 1.4 and 2.0 allow: where nothing was chosen,
    that decides.

    Raises SignatureError when 2.1 was chosen or has been worked with already.
    """
    global _chosen, _reason, settled
    with _lock:
        name = _chosen or _DEFAULT
        if not PROFILES[name].batch_first:
            return PROFILES[name]
        if settled is not None:
            raise SignatureError(
                f"{call}, as torchsparse 1.4 and 2.0 take it, but the process runs with profile "
                f"{name} ({_reason or 'the default, and tensors were processed with it'}). Say "
                "which release the project is written for: enable('torchsparse', profile='1.4'), "
                "or SPARSE_BRIDGE_ENABLE=torchsparse_profile=1.4."
            )
        _chosen, _reason, settled = _OLD, f"detected: {call}", PROFILES[_OLD]
    inherited.renew()
    logger.log(
        logging.WARNING,
        "torchsparse profile %s was detected (%s). Set it with enable('torchsparse', profile=%r) "
        "or SPARSE_BRIDGE_ENABLE=torchsparse_profile=%s, so that worker processes agree.",
        _OLD,
        call,
        _OLD,
        _OLD,
    )
    return PROFILES[_OLD]


def saw_old_name(name: str) -> None:
    """The program assigns to `name`, which 2.1 has not: a warning where nobody chose the release, since coordinates of
    the older ones would be read wrongly."""
    import torch

    if _chosen is None and not torch.compiler.is_compiling():  # compilers refuse warnings
        warn(
            f"the program assigns {name}, an attribute of torchsparse 1.4 and 2.0, but the process runs with profile "
            f"{_DEFAULT}, the default, which reads coordinates as [b, x, y, z]. If the project is written for 1.4 or "
            "2.0, say enable('torchsparse', profile='1.4'); else name profile='2.1'.",
            UserWarning,
        )


def in_force() -> str | None:
    """The profile; None while it is open to correction."""
    return _chosen if settled is None else settled.name


def describe() -> str:
    """One line for `status()`."""
    name = _chosen or _DEFAULT
    reason = _reason or "default"
    if _chosen is None and settled is None:
        reason += "; a call with an older release's signature changes it"
    layout = "[b, x, y, z]" if PROFILES[name].batch_first else "[x, y, z, b]"
    return f"profile {name} ({reason}), coordinates {layout}"


def bind(caller: str, names: tuple[str, ...], positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: positional ones in the order of `names`, then keywords.

    Raises SignatureError, a TypeError, for too many, repeated or unknown ones.
    """
    if not positional and keywords.keys() <= set(names):
        return keywords
    release = peek().name
    if len(positional) > len(names):
        raise SignatureError(
            f"{caller} takes {len(names)} more positional arguments in torchsparse {release} "
            f"({', '.join(names)}), got {len(positional)}."
        )
    bound = dict(zip(names, positional, strict=False))
    for name, value in keywords.items():
        if name in bound:
            raise SignatureError(f"{caller} got {name!r} twice, by position and by name.")
        if name not in names:
            raise SignatureError(
                f"{caller} has no argument {name!r} in torchsparse {release}; it takes "
                f"{', '.join(names)}. If the project is written for another release, name it: "
                "enable('torchsparse', profile=...)."
            )
        bound[name] = value
    return bound
