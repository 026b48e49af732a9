"""Calls of a function that goes on doing its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def noted(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """What is handed to it by position; of a method with its object."""
    own, seen = getattr(owner, name), list[tuple[Any, ...]]()

    def noting(*args: Any, **named: Any) -> Any:
        seen.append(args)
        return own(*args, **named)

    with mock.patch.object(owner, name, noting):
        yield seen
