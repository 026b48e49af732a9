"""Work on deferred convolutions, apart from a program that is traced. Imported while one is traced
only, for it imports compilers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_WHY = (
    "features of a sparse tensor from outside of the graph wait for the layer behind them; read "
    "them before (x.features, x.feats, x.F), or compile without fullgraph=True"
)
_named = inspect.signature(torch.compiler.disable).parameters
_disable: Any = torch.compiler.disable


@_disable(**({"reason": _WHY} if "reason" in _named else {}))
def apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` between two graphs: compilers neither count changes of tensors as eager
    programs do, nor know when a layer was called."""
    return function(*args)
