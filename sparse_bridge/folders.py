"""Folders of the user that this package writes to."""

from __future__ import annotations

import os
import pathlib
import sys

from . import settings


def cache() -> pathlib.Path:
    """Where what can be made again is kept: `SPARSE_BRIDGE_CACHE_DIR`, or the platform's place for
    caches."""
    chosen = settings.get().cache_dir
    if chosen:
        return pathlib.Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "sparse_bridge"
