"""Public functions that become operators in a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from .originals import functions

P = ParamSpec("P")
R = TypeVar("R")


def in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`; while a program is traced, its namesake in `.functional`."""
    name = function.__name__
    functions[name] = function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            from . import functional

            return getattr(functional, name)(function, *args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call
