"""What `python -m sparse_bridge run` hands on to child processes: the same frameworks, enabled the
same way.

A child that is a new Python process, as of multiprocessing's spawn and forkserver, torchrun or
subprocess, has nothing of the program but its environment. What is enabled is written there, and
PYTHONPATH gets the folder `startup`, whose `sitecustomize` Python runs first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "SPARSE_BRIDGE_INHERITED"
_JOINING = "sparse_bridge_joining"  # the name of `startup/joining.py` in a child
_PACKAGE = Path(__file__).resolve().parents[2]
_STARTUP = str(_PACKAGE / "startup")

Choices = dict[str, dict[str, Any]]

_describe: Callable[[], Choices] | None = None
_counts = ""


def hand_on(describe: Callable[[], Choices], counts: str = "") -> None:
    """Have children that are started from now on enable what `describe()` says, and write the calls
    of their layers to the folder `counts`."""
    global _describe, _counts
    _describe, _counts = describe, counts
    paths = _python_path()
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *paths])
    renew()


def renew() -> None:
    """What is enabled has changed."""
    if _describe is not None:
        state = {
            "python": [sys.prefix, sys.hexversion],
            "joining": _JOINING,
            "package": str(_PACKAGE),
            "counts": _counts,
            "frameworks": _describe(),
        }
        os.environ[VARIABLE] = json.dumps(state)


def unreachable() -> str | None:
    """The option with which Python runs that keeps children from inheriting; None: none."""
    if sys.flags.ignore_environment:
        return "-I" if sys.flags.isolated else "-E"
    return "-S" if sys.flags.no_site else None


def finder() -> Any:
    """What enables frameworks in this process, which is a child, when they are imported; None where
    it is none."""
    importers = [importer for importer in sys.meta_path if type(importer).__module__ == _JOINING]
    return importers[0] if importers else None


def forget() -> None:
    """Hand on nothing, and inherit nothing."""
    global _describe
    _describe = None
    os.environ.pop(VARIABLE, None)
    paths = _python_path()
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    inheriting = finder()
    if inheriting is not None:
        sys.meta_path.remove(inheriting)


def _python_path() -> list[str]:
    """PYTHONPATH as the program has it."""
    value = os.environ.get("PYTHONPATH", "")
    return [path for path in value.split(os.pathsep) if path != _STARTUP] if value else []


def waiting() -> Choices:
    """What this process, a child, has not enabled yet; what is taken out is not enabled."""
    inheriting = finder()
    choices: Choices = {} if inheriting is None else inheriting.waiting
    return choices


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """This thread enables a framework that waits, whose imports are not answered meanwhile."""
    inheriting = finder()
    inheriting.joining = threading.get_ident()
    try:
        yield
    finally:
        inheriting.joining = None
