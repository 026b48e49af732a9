"""What callers hand over in the place of tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import tensor_expected


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
