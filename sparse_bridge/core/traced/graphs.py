"""Running between two graphs. Imported while a program is traced only, for it imports compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from ..conv import override


@runtime_checkable
class LeavesGraph(Protocol):
    """Arguments that must be told what the graph knew of them."""

    def leave_graph(self) -> None:
        """Take over what only the graph knew, for layers that run outside of it."""


def outside(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """`function(*args, **more)` between two graphs."""
    return between_graphs(override.traced(), function, args, more)


@torch.compiler.disable
def between_graphs(dataflow: str, function: Callable[..., Any], args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """`function(*args, **more)`, outside of graphs. dataflow: of the traced program, "" for none; layers inside take
    it, and are not deferred."""
    for value in args:
        if isinstance(value, LeavesGraph):
            value.leave_graph()
    with override.entered(dataflow), override.at_once():  # what follows is in the next graph
        return function(*args, **more)
