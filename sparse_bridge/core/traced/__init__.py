"""Functions that are no operators: while a program is traced they run between two graphs.

Up to torch 2.7 all layers of sparse_bridge do: `torch.compile` neither traces nor compiles them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ..device.torch_compat import WHOLE_GRAPHS

P = ParamSpec("P")
R = TypeVar("R")

if not WHOLE_GRAPHS:
    from . import skipping

    skipping.skip()


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`; in a traced program one break, behind which the next graph begins. With
    `fullgraph=True` torch says so."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            from .graphs import outside

            return outside(function, *args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call
