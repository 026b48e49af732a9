"""Handing a norm and an activation to the next convolution of this thread, past the framework's
own layer code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .dataflows import Norm

__all__ = ["Pending", "collect", "offer", "produced", "take"]

_users = 0  # how many offers and collectors there are in all threads
_local = threading.local()
_lock = threading.Lock()


class Pending(NamedTuple):
    """What a convolution is to apply to its result."""

    norm: Norm
    activation: str | None
    alpha: float


@contextmanager
def _counted() -> Iterator[None]:
    global _users
    with _lock:
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1


@contextmanager
def offer(pending: Pending) -> Iterator[list[torch.Tensor]]:
    """The first convolution in this block takes `pending`; the list then holds its result."""
    before = getattr(_local, "offer", None)
    taken: list[torch.Tensor] = []
    with _counted():
        _local.offer = (pending, taken)
        try:
            yield taken
        finally:
            _local.offer = before


@contextmanager
def collect() -> Iterator[list[torch.Tensor]]:
    """The results of every convolution in this block, in order."""
    before = getattr(_local, "results", None)
    results: list[torch.Tensor] = []
    with _counted():
        _local.results = results
        try:
            yield results
        finally:
            _local.results = before


def take() -> tuple[Pending, list[torch.Tensor]] | None:
    """The offer in force, which is then gone; costs a comparison where there is none."""
    if not _users:
        return None
    found = getattr(_local, "offer", None)
    _local.offer = None
    return found


def produced(y: torch.Tensor) -> torch.Tensor:
    """Tell a collector of a convolution's result."""
    if _users:
        results = getattr(_local, "results", None)
        if results is not None:
            results.append(y)
    return y
