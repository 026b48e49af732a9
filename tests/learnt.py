"""What prefetch and replays have learnt of inputs, for tests that run without them as well."""

from __future__ import annotations

import contextlib

from sparse_bridge.adapters import base
from sparse_bridge.errors import UnsupportedError

__all__ = ["forget"]


def forget() -> None:
    """Drop it, if this installation has `core.prefetch`."""
    with contextlib.suppress(UnsupportedError):
        base.prefetch().forget()
