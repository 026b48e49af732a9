"""What an epilogue reads beside the sums, as arguments of a launch."""

from __future__ import annotations

import torch

# Bias, mean, variance, gain and shift of a norm [C_out], residual like y; None for what is absent.
Vectors = tuple["torch.Tensor | None", ...]
NO_VECTORS: Vectors = (None,) * 6


def tensors_of(vectors: Vectors, y: torch.Tensor) -> list[torch.Tensor]:
    """What stands in a launch for vectors: y, of any shape and dtype, for one that is None. Kernels do
    not read it there. Nothing is copied: [bias, mean, variance, gain, shift, residual]."""
    return [y if vector is None else vector for vector in vectors]
