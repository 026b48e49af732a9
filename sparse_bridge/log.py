"""The package logger. Silent unless the application configures logging; root handlers are never
touched."""

from __future__ import annotations

import logging
import threading

from . import state

logger = logging.getLogger("sparse_bridge")
logger.addHandler(logging.NullHandler())

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
