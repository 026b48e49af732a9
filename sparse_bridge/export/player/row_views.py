"""Views of rows, and results, that a recorder lets through: those that treat all rows alike, as there may be fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..plugin_checks import ExportError
from .recorder import Recorder

_aten = torch.ops.aten
# Views by which rows could be told apart by their numbers, with the argument that is the axis.
_BY_NUMBER = {
    _aten.slice: 1,
    _aten.select: 1,
    _aten.narrow: 1,
    _aten.split: 2,
    _aten.split_with_sizes: 2,
    _aten.unbind: 1,
    _aten.unfold: 1,
}


def check_view(it: Recorder, packet: Any, tensors: Sequence[torch.Tensor], args: Sequence[Any], result: Any) -> None:
    """Raises ExportError where a view tells rows apart by their numbers: there may be fewer rows."""
    x = tensors[0]
    if not (it.rows and x.ndim and x.is_floating_point() and it.is_written(x)):
        return
    axis = _BY_NUMBER.get(packet)
    if axis is not None:
        number = args[axis] if len(args) > axis else 0
        whole = isinstance(result, torch.Tensor) and result.shape == x.shape
        wrong = x.shape[number] in it.rows and not whole
    else:
        wrong = x.shape[0] in it.rows and isinstance(result, torch.Tensor) and x.shape[0] not in result.shape
    if wrong:
        raise ExportError(
            f"{it.where()} takes rows of {list(x.shape)} by their numbers ({packet.__name__}); how many there are is "
            "known on the GPU alone. Leave rows to layers and heads that treat all of them alike."
        )


def require_rows_first(it: Recorder, outputs: Sequence[torch.Tensor]) -> None:
    """Raises ExportError for a result of rows that do not lie on its first axis, of which a player tells the end."""
    for number, output in enumerate(outputs):
        if any(it.by_rows(output, axis) for axis in range(output.ndim)):
            raise ExportError(
                f"output {number} of the model, {list(output.shape)}, has rows on another axis than its first, where "
                "a package hands out those in use. Transpose it."
            )
