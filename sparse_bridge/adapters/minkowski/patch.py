"""Patches of the real MinkowskiEngine: none, this adapter is a stand-in only.

Coordinate maps of the real one live in its compiled manager, which makes new maps only inside its
own layers, so that layers cannot be replaced one by one exactly.
"""

from __future__ import annotations

from ...errors import LifecycleError
from ..base import Patch


def patches() -> list[Patch]:
    """Raises LifecycleError."""
    raise LifecycleError("MinkowskiEngine is answered by a stand-in, never patched.")
