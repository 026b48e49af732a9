"""A few numbers that kernels and torch read on the device: sent once."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

_constants: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """These few numbers on `device`, int32 [n]; sent once, and not to be changed."""
    tensor = _constants.get((values, device))
    if tensor is None:
        with _disable_current_modes(), torch.inference_mode(False):  # a graph that is tried takes no new numbers
            tensor = torch.tensor(values, dtype=torch.int32, device=device)
        _constants[values, device] = tensor
    return tensor


def constants() -> list[torch.Tensor]:
    """All of them, int32 [n] each. Graphs may read them: they stay."""
    return list(_constants.values())
