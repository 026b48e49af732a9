"""Which generation of FlexGEMM the process speaks: "1" (channels behind the batch) or "2.0"
(channels last)."""

from __future__ import annotations

import importlib.machinery
import sys

from ...errors import LifecycleError
from ..base import refuse_profile

PROFILES = ("1", "2.0")

_chosen = PROFILES[0]
_reason = "default"


def generation(package: object) -> str:
    """Of an imported FlexGEMM; only 2.0 has layers."""
    return PROFILES[hasattr(package, "nn")]


def _installed(mode: str) -> str | None:
    """The generation of the FlexGEMM that answers imports, or whose files are there although they
    do not import; None where there is none."""
    if mode == "patch":
        return generation(sys.modules["flex_gemm"])
    spec = importlib.machinery.PathFinder.find_spec("flex_gemm")
    folders = None if spec is None else spec.submodule_search_locations
    if not folders:
        return None
    layers = importlib.machinery.PathFinder.find_spec("flex_gemm.nn", list(folders))
    return PROFILES[layers is not None]


def choose(mode: str, name: str | None) -> str:
    """Start with a profile; None: that of the FlexGEMM that is installed, else 1.x.

    Raises: LifecycleError where mode is "patch" and another one is installed.
    """
    global _chosen, _reason
    installed = _installed(mode)
    if mode == "patch" and name not in (None, installed):
        raise LifecycleError(
            f"profile {name!r} was asked for, but FlexGEMM {installed} is installed, which is to be "
            "patched. Leave the profile out, or use mode='standin' before flex_gemm is imported."
        )
    _reason = "default" if installed is None else f"FlexGEMM {installed} is installed"
    _chosen = installed or PROFILES[0]
    if name is not None:
        _reason, _chosen = f"enable(profile={name!r})", name
    return _chosen


def confirm(name: str) -> None:
    """A second `enable()` names a profile. Raises LifecycleError when another one is in force."""
    refuse_profile("flex_gemm", _chosen, name)


def in_force() -> str:
    """The generation."""
    return _chosen


def describe() -> str:
    """One line for `status()`."""
    layout = "(B, C, S1, S2, S3)" if _chosen == "1" else "(B, S1 .. SD, C)"
    return f"profile {_chosen} ({_reason}), shapes {layout}"
