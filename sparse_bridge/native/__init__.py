"""The compiled helper: what is the same at every call of a layer, done in C (`native.c`).

It is compiled at first use, in the background, by the C compiler that Triton needs anyway, and
stored in the cache folder. Nothing depends on it: without it, or where it refuses a call, Python
does the same with the same bits. `reason()` says why it is not used.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import log, settings
from ..refusals import Refusal, Why
from . import build

Listener = Callable[[Any], None]  # called with the module, or None where it is not to be used

_WAIT = 20.0  # seconds that launches, in all, wait for the compiler; it takes one or two

_lock = threading.RLock()
_thread: threading.Thread | None = None
_until = 0.0  # when nobody waits for it any more
_module: Any = None
_reason = Why.HELPER_NOT_BUILT.says()
_listeners: list[Listener] = []


def begin() -> None:
    """Have the helper compiled and loaded in the background, once per process."""
    global _thread, _until
    if _thread is not None:
        return
    with _lock:
        if _thread is None:
            thread = threading.Thread(target=_build, name="sparse_bridge-native", daemon=True)
            _until = time.monotonic() + _WAIT
            thread.start()
            _thread = thread
            # A compiler that is still at work when the program ends is waited for, and so it is
            # before a fork, whose child would have neither the thread nor what it makes.
            atexit.register(_finish)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(before=_finish)


def _finish() -> None:
    """Wait until the helper is there, or it is clear that there will be none."""
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(max(0.0, _until - time.monotonic()))


def _build() -> None:
    global _module
    try:
        library = build.load()
        with _lock:
            for listener in _listeners:
                listener(library)
            _module = library
    except Exception as error:  # whatever it is, Python does all
        _do_without(error)


def _do_without(error: Exception) -> None:
    global _module, _reason
    refused = isinstance(error, Refusal)
    _module, _reason = None, str(error) if refused else Why.HELPER_ERROR.says(type(error).__name__, error)
    expected = refused and getattr(error, "why", None) is not Why.HELPER_READS
    level = log.logger.info if expected else log.logger.warning
    level("the compiled helper is not used: %s", _reason)


def module() -> Any:
    """The helper, for which a first compilation is waited for; None where there is none, or it is
    turned off."""
    if not settings.get().native:
        return None
    begin()
    if _module is None:
        _finish()
    return _module


def when_ready(listener: Listener) -> None:
    """Have `listener` called with the helper once it is there, now if it is."""
    with _lock:
        _listeners.append(listener)
        if _module is not None:
            try:
                listener(_module)
            except Exception as error:
                _do_without(error)


def reason() -> str | None:
    """Why the helper is not used in this process; None where it is."""
    if not settings.get().native:
        return Why.HELPER_OFF.says()
    return None if _module is not None else _reason


def described() -> str:
    """What a GPU of this machine would get, in words; builds nothing."""
    if not settings.get().native:
        return Why.HELPER_OFF.says()
    problem = build.problem()
    return "can be compiled" if problem is None else f"not used: {problem}"
