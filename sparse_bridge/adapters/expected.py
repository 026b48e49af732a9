"""What layers will ask the engine to multiply, told before their first call: `core.warmup`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..core.conv.epilogue import Epilogue
from ..core.warmup.compilation import Expected, expect

__all__ = ["Expected", "expect", "of_kernel", "trains"]


def trains(weight: torch.Tensor) -> bool:
    """Whether its gradient will be asked for, as things are."""
    return torch.is_grad_enabled() and weight.requires_grad


def of_kernel(layer: Any, symmetric: bool, tf32: bool) -> Iterator[Expected]:
    """The product of a layer with `kernel` [V, C_in, C_out]; others are plain matrix products."""
    if layer.kernel.ndim == 3:
        bias = None if layer.bias is None else layer.bias.view(-1)
        precision = "tf32" if tf32 else "ieee"
        yield Expected(
            layer, layer.kernel, "vio", Epilogue(bias), 1, symmetric,
            trains(layer.kernel), precision,
        )  # fmt: skip
