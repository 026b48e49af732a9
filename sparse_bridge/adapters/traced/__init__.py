"""What all adapters do while a program is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def eager_only(function: F) -> F:
    """A function that is no operator: compiled programs run it between two graphs, and with
    `fullgraph=True` torch says so."""

    @functools.wraps(function)
    def run(*args: object, **more: object) -> object:
        if torch.compiler.is_compiling():
            from .graphs import outside

            return outside(function, *args, **more)
        return function(*args, **more)

    return run  # type: ignore[return-value]
