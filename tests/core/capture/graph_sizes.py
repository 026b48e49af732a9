"""Captured calls of few rows, so that small inputs make graphs. Within each other the last one counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sparse_bridge import settings
from sparse_bridge.core.capture import graphed_module, padded
from sparse_bridge.core.closed_world.audit import Audit
from tests.rules import ruled


class _Trusted:
    """A model that is taken for closed, whatever it does."""

    grid_uses = frozenset()

    def __init__(self, model: Any, tensors: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def guards(self) -> Any:
        return self

    def hold(self) -> bool:
        return True


@contextlib.contextmanager
def graphs_of(rows: int, watched: bool = False) -> Iterator[None]:
    """Captured calls are padded to so many rows, or to one of the numbers above.

    No replay is compared with the layers, so that a test can count which calls are replayed; a test of comparisons
    sets `compare_every`.  watched: whether a call is watched before the capture, as for users; without, what a test
    puts around the layers may keep state.
    """
    audit = Audit if watched else _Trusted
    with ruled(padded, _LEAST=rows), settings.override(compare_every=0), ruled(graphed_module, Audit=audit):
        yield
