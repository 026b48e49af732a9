"""Captured calls of few rows, so that small inputs make graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sparse_bridge import settings
from sparse_bridge.core.capture import padded
from tests.rules import ruled


@contextlib.contextmanager
def graphs_of(rows: int, compared: bool = False) -> Iterator[None]:
    """Captured calls are padded to so many rows, or to one of the numbers above.

    compared: whether replays are compared with the layers from time to time, as they are for users.
    Without, a test can count which calls are replayed.
    """
    every = settings.get().compare_every if compared else 0
    with ruled(padded, _LEAST=rows), settings.override(compare_every=every):
        yield
