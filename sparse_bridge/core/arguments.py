"""What callers hand over in the place of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import tensor_expected


def expect_tensors(caller: str, **values: Any) -> None:
    """Raises: TensorExpectedError, by the argument's name, for a value that is no tensor."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise tensor_expected(value, name, caller)


def refuse_arrays(caller: str, **values: Any) -> None:
    """`expect_tensors` of numpy arrays alone, where not only tensors belong."""
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            raise tensor_expected(value, name, caller)
