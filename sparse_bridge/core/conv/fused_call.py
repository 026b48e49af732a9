"""Handing a norm, an activation and a sum to the next convolution of this thread, past the
framework's own layer code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .epilogue import Norm

listening = False  # whether anybody in this process ever offered or collected
_local = threading.local()


class Pending(NamedTuple):
    """What a convolution is to apply to its result.

    summed: None, or told of the sum if features are added to the result: the activation then
    belongs behind that sum, and the result is to be a `Deferred`.
    """

    norm: Norm | None
    activation: str | None
    alpha: float
    summed: Callable[[torch.Tensor], None] | None = None


def offer(pending: Pending, run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
    """(what `run` returns, the result of the first convolution in it, which took `pending`)."""
    global listening
    listening = True
    before = getattr(_local, "offer", None)
    taken: list[torch.Tensor] = []
    _local.offer = (pending, taken)
    try:
        out = run(*args, **kwargs)
    finally:
        _local.offer = before
    return out, taken[0] if taken else None


@contextmanager
def collect() -> Iterator[list[torch.Tensor]]:
    """The results of every convolution in this block, in order."""
    global listening
    listening = True
    before = getattr(_local, "results", None)
    results: list[torch.Tensor] = []
    _local.results = results
    try:
        yield results
    finally:
        _local.results = before


def collecting() -> bool:
    """Whether this thread collects results; costs a comparison where nobody ever did."""
    return listening and getattr(_local, "results", None) is not None


def busy() -> bool:
    """Whether this thread offers to the next convolution, or collects."""
    return listening and (getattr(_local, "offer", None) is not None or collecting())


def take() -> tuple[Pending, list[torch.Tensor]] | None:
    """The offer in force, which is then gone; costs a comparison where there is none."""
    if not listening:
        return None
    found = getattr(_local, "offer", None)
    _local.offer = None
    return found


def produced(y: torch.Tensor) -> torch.Tensor:
    """Tell a collector of a convolution's result."""
    if listening:
        results = getattr(_local, "results", None)
        if results is not None:
            results.append(y)
    return y
