"""Products that layers will ask of the engine, announced before their first call: `core.warmup`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import state
from ..core.conv.epilogue import Epilogue
from ..core.warmup import compilation
from ..core.warmup.compilation import begin, expect
from ..core.warmup.map_kernels import Strided
from ..core.warmup.product_kernels import Expected, Sizes

__all__ = ["Expected", "Sizes", "begin", "expect", "new_coordinates", "of_kernel", "pointwise", "trains"]

state.owns(compilation.reset)


def trains(weight: torch.Tensor) -> bool:
    """Whether its gradient will be asked for, as things are."""
    return torch.is_grad_enabled() and weight.requires_grad


def new_coordinates(kernel: Sequence[int], stride: Sequence[int]) -> Strided | None:
    """The map of a layer that makes new coordinates, where it has three dimensions."""
    return Strided(tuple(kernel), tuple(stride)) if len(kernel) == 3 else None


def of_kernel(
    layer: Any, symmetric: bool, tf32: bool, strided: Strided | None = None, expanding: bool = False
) -> Iterator[Expected]:
    """The product of a layer with `kernel` [V, C_in, C_out], or [C_in, C_out] of a volume of 1.

    strided: of its map, see `new_coordinates`.  expanding: it makes more rows than it is given.
    """
    bias = None if layer.bias is None else layer.bias.view(-1)
    if layer.kernel.ndim == 2:
        yield pointwise(layer, layer.kernel, bias)
    if layer.kernel.ndim == 3:
        precision = "tf32" if tf32 else "ieee"
        yield Expected(
            layer,
            layer.kernel,
            "vio",
            Epilogue(bias),
            1,
            symmetric,
            trains(layer.kernel),
            precision,
            strided=strided,
            expanding=expanding,
        )


def pointwise(layer: Any, matrix: torch.Tensor, bias: torch.Tensor | None) -> Expected:
    """The product of a layer of kernel volume 1 with `matrix` [C_in, C_out]."""
    learns = trains(matrix)
    weight, end = matrix.detach()[None], Epilogue(bias)
    return Expected(layer, weight, "vio", end, trains=learns, pointwise=True)
