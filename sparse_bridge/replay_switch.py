"""Which models and calls are never replayed from captured graphs, because the program says so."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_local = threading.local()
_eager_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """In this block the calling thread replays nothing from captured graphs: every layer runs."""
    outer = getattr(_local, "eager", False)
    _local.eager = True
    try:
        yield
    finally:
        _local.eager = outer


def forbid(model: nn.Module) -> None:
    """Never replay this model or a part of it."""
    _eager_modules.update(model.modules())


def forgive(model: nn.Module) -> None:
    """Undo `forbid`."""
    _eager_modules.difference_update(model.modules())


def allowed(model: nn.Module) -> bool:
    """Whether a call of this model may be replayed now, as far as the program has said."""
    return not getattr(_local, "eager", False) and model not in _eager_modules
