"""A few numbers that kernels and torch read on the device: sent once."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

_constants: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """These few numbers on `device`, int32 [n]; sent once, and not to be changed."""
    tensor = _constants.get((values, device))
    if tensor is None:
        with _disable_current_modes(), torch.inference_mode(False):  # it outlives whoever looks on
            tensor = torch.tensor(values, dtype=torch.int32, device=device)
        _constants[values, device] = tensor
    return tensor


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether it is one of them, or a view of one. Graphs may read them: they stay."""
    storage = tensor.untyped_storage()._cdata
    return any(known.untyped_storage()._cdata == storage for known in list(_constants.values()))
