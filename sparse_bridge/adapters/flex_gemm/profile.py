"""Which generation of FlexGEMM the process speaks: "1" (channels behind the batch) or "2.0"
(channels last)."""

from __future__ import annotations

from ...errors import LifecycleError

PROFILES = ("1", "2.0")

_chosen = PROFILES[0]
_reason = "default"


def choose(name: str | None) -> str:
    """Start with a profile; None: 1.x."""
    global _chosen, _reason
    _reason = "default" if name is None else f"enable(profile={name!r})"
    _chosen = PROFILES[0] if name is None else name
    return _chosen


def confirm(name: str) -> None:
    """A second `enable()` names a profile. Raises LifecycleError when another one is in force."""
    if name != _chosen:
        raise LifecycleError(
            f"flex_gemm is enabled already with profile {_chosen!r}, not {name!r}. Call "
            "sparse_bridge.disable('flex_gemm') first, or leave the option out."
        )


def describe() -> str:
    """One line for `status()`."""
    layout = "(B, C, S1, S2, S3)" if _chosen == "1" else "(B, S1 .. SD, C)"
    return f"profile {_chosen} ({_reason}), shapes {layout}"
