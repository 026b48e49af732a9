"""What callers hand over in the place of tensors, maps and numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..errors import DataTypeError, GeometryError, tensor_expected

# By the class that is expected: where its objects come from.
_MAKERS = {
    "CoordinateMap": "a CoordinateMap of `coordinate_map`",
    "KernelMap": "a KernelMap of a map builder",
    "Offsets": "Offsets, such as `kernel_offsets((3, 3, 3))`",
    "Norm": "a Norm(mean, var, weight, bias, eps)",
}


def expect_tensors(caller: str, **values: Any) -> None:
    """Raises: TensorExpectedError, by the argument's name, for a value that is no tensor."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise tensor_expected(value, name, caller)


def refuse_arrays(caller: str, **values: Any) -> None:
    """`expect_tensors` of numpy's arrays and their like alone, where not only tensors belong."""
    for name, value in values.items():
        an_array = hasattr(type(value), "__array__") and getattr(value, "ndim", 0) > 0
        if an_array and not isinstance(value, torch.Tensor):
            raise tensor_expected(value, name, caller)


def expect(kind: type, **values: Any) -> None:
    """Raises: DataTypeError, by the argument's name, for a value that is no `kind`, nor stands for one in a graph."""
    for name, value in values.items():
        if _is(value, kind):
            continue
        advice = f"expected {_MAKERS[kind.__name__]}."
        if isinstance(value, tuple) and len(value) == 2 and any(_is(part, kind) for part in value):
            part = "first" if _is(value[0], kind) else "second"
            advice = f"`strided` and `generative` return (coordinates, map); pass the {part}."
        raise DataTypeError(f"{name} is {type(value).__name__}; {advice}")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) or getattr(value, "engine_class", None) is kind


def expect_count(name: str, value: Any) -> None:
    """Raises: GeometryError for a value that is no whole number of 0 or more."""
    try:
        wrong = operator.index(value) < 0
    except TypeError:
        wrong = True
    if wrong:
        raise GeometryError(f"{name} is {value!r}; expected a whole number, 0 or more.")
