"""The TF32 switch of an installed FlexGEMM."""

from __future__ import annotations

import importlib
from typing import Any

from ..base import Patch


def switch(module: str, name: str, versions: str) -> list[Patch]:
    """The patch that turns FlexGEMM's own default, True, into None: torch's switch decides, until
    somebody assigns the name. False stays. None where the build has no such switch."""
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return []
    if getattr(owner, name, None) is not True:
        return []
    return [Patch(owner, name, None, "TF32 follows torch until it is assigned", versions)]
