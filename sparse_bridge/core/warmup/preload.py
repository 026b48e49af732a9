"""What Triton does once per process, done before the first layer runs.

Importing Triton takes 0.2 s; hashing its own files, hundreds of megabytes without which it finds no
compiled kernel, twice that; with empty caches it compiles its driver with a C compiler, too, and
all kernels are still to be compiled, so the worker processes for that are started. With the first
layer that is made Triton is imported, in that thread, because imports of one package in two threads
can fail; the rest, which leaves the interpreter to others, goes on while the program builds its
model and reads its data.
"""

from __future__ import annotations

import os
import threading

import torch

from ... import log, native, settings
from ...kernels.runtime import target as targets

_LONGEST = 10.0  # seconds that a fork waits

_lock = threading.Lock()
_begun = False
_thread: threading.Thread | None = None


def begin() -> None:
    """Once per process, where there is a GPU and its kernels are Triton's own."""
    global _begun
    if _begun:
        return
    with _lock:
        if _begun:
            return
        _begun = True
        # Counting GPUs does not initialise them.
        if targets.interpreted() or not settings.get().warmup or not torch.cuda.device_count():
            return
        _import_and_hash()
        if settings.get().native:
            native.begin()


def _import_and_hash() -> None:
    global _thread
    try:
        from ...kernels.runtime import compile_processes, triton_compat
    # Whatever is wrong with this Triton is told where it is wanted.
    except Exception as error:
        log.logger.debug("no preload: %s", error)
        return

    def prepare() -> None:
        if triton_compat.cache_is_empty():
            compile_processes.start()
        triton_compat.prepare()

    _thread = threading.Thread(target=prepare, name="sparse_bridge-preload", daemon=True)
    # A child process would find the locks of what is being imported taken for ever.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=finish)
    _thread.start()


def finish() -> None:
    """Wait for what has begun: nobody does the same work beside it."""
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(_LONGEST)
