"""The package logger, and warnings. The logger is silent unless the application configures logging; root handlers are
never touched."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from types import FrameType

from . import state
from .names import is_framework

logger = logging.getLogger("sparse_bridge")
logger.addHandler(logging.NullHandler())

_PLACES = (os.path.dirname(__file__) + os.sep, "<frozen ")  # no lines that a user can change
_seen: set[tuple[str, ...]] = set()
_lock = threading.Lock()


@state.owns
def reset() -> None:
    """Log again what `once` has logged."""
    with _lock:
        _seen.clear()


def once(key: tuple[str, ...], message: str, level: int = logging.INFO) -> bool:
    """Log `message` the first time `key` is seen in this process; True if it was logged now."""
    with _lock:
        if key in _seen:
            return False
        _seen.add(key)
    logger.log(level, message)
    return True


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line of the user's that led here, maybe through modules of torch; of `sys` where none did."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _no_users(frame):
        frame = frame.f_back
    if frame is None:
        warnings.warn_explicit(text, category, "sys", 1)
    else:
        names = frame.f_globals
        place = frame.f_code.co_filename, frame.f_lineno, names.get("__name__")
        warnings.warn_explicit(text, category, *place, names.setdefault("__warningregistry__", {}))


def _no_users(frame: FrameType) -> bool:
    """Whether its line is of this package, of the libraries around layers, or of Python."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package == "torch" or is_framework(package) or frame.f_code.co_filename.startswith(_PLACES)
