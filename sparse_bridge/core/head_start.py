"""What Triton does once per process, done while the program still builds its model.

Importing Triton and hashing its own files, hundreds of megabytes without which it finds no compiled
kernel, takes half a second of a first layer. Reading and hashing leave the interpreter to others.
"""

from __future__ import annotations

import os
import threading

from .. import log, settings
from ..kernels import target as targets

__all__ = ["begin"]

_LONGEST = 10.0  # seconds that a fork waits

_lock = threading.Lock()
_thread: threading.Thread | None = None


def begin() -> None:
    """Start in the background, once per process, where torch is built for GPUs."""
    global _thread
    if _thread is not None or not targets.gpu_build():
        return
    with _lock:
        if _thread is not None or targets.interpreted() or not settings.get().ahead:
            return
        _thread = threading.Thread(target=_load, name="sparse_bridge-head-start", daemon=True)
    # A child process would find the locks of the modules that are being imported taken for ever.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_finish)
    _thread.start()


def _load() -> None:
    try:
        from ..kernels import features

        features.hash_files()
    # Whatever is wrong with this Triton is told where it is wanted.
    except Exception as error:
        log.logger.debug("no head start: %s", error)


def _finish() -> None:
    if _thread is not None and _thread.is_alive() and _thread is not threading.current_thread():
        _thread.join(_LONGEST)
