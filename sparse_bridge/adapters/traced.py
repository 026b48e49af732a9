"""What all adapters do while a program is traced. Imported there only, for it imports compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.conv import override


def outside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` between two graphs."""
    return _between_graphs(override.traced(), function, *args)


@torch.compiler.disable
def _between_graphs(dataflow: str, function: Callable[..., Any], *args: Any) -> Any:
    with override.entered(dataflow):
        return function(*args)
