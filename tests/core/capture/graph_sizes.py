"""Captured calls of few rows, so that small inputs make graphs."""

from __future__ import annotations

import contextlib

from sparse_bridge.core.capture import padded
from tests.rules import ruled


def graphs_of(rows: int) -> contextlib.AbstractContextManager[None]:
    """Captured calls are padded to so many rows, or to one of the numbers above."""
    return ruled(padded, _LEAST=rows)
