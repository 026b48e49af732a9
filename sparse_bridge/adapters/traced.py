"""What all adapters do while a program is traced. Imported there only, for it imports compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def outside(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` between two graphs."""
    return function(*args)
