"""What tests of several workers need and takes seconds to make: one of them makes it for all."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import filelock
import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """The folder in which `make` has written; the name stands for all of what it does."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.done"
    with filelock.FileLock(f"{folder}.lock"):
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder
