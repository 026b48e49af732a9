"""What layers will ask the engine to multiply, told before their first call: `core.first_use`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..core.dataflows import Epilogue
from ..core.first_use import Expected, expect
from . import fusion

__all__ = ["Expected", "expect", "of_kernel", "of_minkowski", "of_spconv", "of_spconv_sequence"]

_ACTIVATIONS = {"ReLU": "relu", "LeakyReLU": "leaky_relu", "Sigmoid": "sigmoid"}


def _trains(layer: Any, weight: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and weight.requires_grad


def _spconv(layer: Any, end: Epilogue) -> Expected:
    odd = all(size % 2 for size in layer.kernel_size)
    return Expected(
        layer, layer.weight, "ovi", end, layer.groups, layer.subm and odd,
        _trains(layer, layer.weight),
    )  # fmt: skip


def of_spconv(layer: Any) -> Iterator[Expected]:
    """The product of a `SparseConvolution`."""
    if not layer.conv1x1:
        name = getattr(layer.act_type, "name", "None_")
        fused = None if layer.training else _ACTIVATIONS.get(name)
        yield _spconv(layer, Epilogue(layer.bias, fused, float(layer.act_alpha)))


def of_spconv_sequence(container: Any) -> Iterator[Expected]:
    """The products of a `SparseSequential` that end in a norm and activation of its own."""
    if torch.is_grad_enabled():
        return
    children = list(container.children())
    for place, child in enumerate(children):
        tail = fusion.tail_after(children, place + 1)
        if tail is not None and not child.training and not getattr(child, "conv1x1", True):
            yield _spconv(child, Epilogue(child.bias, tail.activation, tail.alpha, tail.values))


def of_kernel(layer: Any, symmetric: bool, tf32: bool) -> Iterator[Expected]:
    """The product of a layer with `kernel` [V, C_in, C_out]; others are plain matrix products."""
    if layer.kernel.ndim == 3:
        bias = None if layer.bias is None else layer.bias.view(-1)
        precision = "tf32" if tf32 else "ieee"
        yield Expected(
            layer, layer.kernel, "vio", Epilogue(bias), 1, symmetric,
            _trains(layer, layer.kernel), precision,
        )  # fmt: skip


def of_minkowski(layer: Any) -> Iterator[Expected]:
    """The product of a MinkowskiEngine convolution."""
    generator = layer.kernel_generator
    odd = all(size % 2 for size in generator.kernel_size)
    same = odd and not generator.requires_strided_coordinates
    yield from of_kernel(layer, same, torch.backends.cuda.matmul.allow_tf32)
