"""Operators of torch that round by how many rows there are, in a trial computed as the layers have them computed.

A product of features with a matrix in fp32, and a batch norm of torch in training, have other bits over a padded input,
and nothing else need be wrong. Computed of the rows in use alone, a trial shows whether that is all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...maps.rows import rows_of

_local = threading.local()
_ROWS_AT = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}  # the argument whose rows are the result's


class ExactOperators(TorchDispatchMode):
    """In this block of a trial, such operators see the rows in use alone.  used: whether there were any."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __enter__(self) -> ExactOperators:
        self._outer, _local.mode = getattr(_local, "mode", None), self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _local.mode = self._outer
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, classes: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        at = _ROWS_AT.get(func)
        if at is None:
            return func(*args, **(kwargs or {}))
        return of_rows_in_use(lambda rows: func(*args[:at], rows, *args[at + 1 :], **(kwargs or {})), args[at])


def exact() -> bool:
    """Whether this thread is in an `ExactOperators`."""
    return getattr(_local, "mode", None) is not None


def of_rows_in_use(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What `function` makes of x [capacity, C], row by row, in an `ExactOperators` of the rows in use, with what layers
    leave behind them; elsewhere of all."""
    mode, rows = getattr(_local, "mode", None), rows_of(x)
    if mode is None or rows.device is None:
        return function(x)
    mode.used = True
    y = function(x[: rows.estimate])
    return torch.cat([y, y.new_full((rows.capacity - len(y), *y.shape[1:]), rows.padding_value or 0.0)])
