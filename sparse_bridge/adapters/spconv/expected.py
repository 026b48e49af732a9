"""What spconv layers will ask the engine to multiply, told before their first call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...core.conv.dataflows import Epilogue
from .. import fusion
from ..expected import Expected, expect, trains
from .layers import allow_tf32
from .translate import ACTIVATIONS

__all__ = ["expect", "of_layer", "of_sequence"]


def _product(layer: Any, end: Epilogue, norm: Any = None) -> Expected:
    odd = all(size % 2 for size in layer.kernel_size)
    return Expected(
        layer, layer.weight, "ovi", end, layer.groups, layer.subm and odd, trains(layer.weight),
        "tf32" if allow_tf32() else "ieee", norm,
    )  # fmt: skip


def of_layer(layer: Any) -> Iterator[Expected]:
    """The product of a `SparseConvolution`."""
    if not layer.conv1x1:
        fused = None if layer.training else ACTIVATIONS[getattr(layer.act_type, "name", "None_")]
        yield _product(layer, Epilogue(layer.bias, fused, float(layer.act_alpha)))


def of_sequence(container: Any) -> Iterator[Expected]:
    """The products of a `SparseSequential` that end in a norm and activation of its own, or that a
    norm in training takes."""
    children = list(container.children())
    for place, child in enumerate(children):
        if torch.is_grad_enabled():
            norm = fusion.learner_after(children, place + 1)
            if norm is not None and not getattr(child, "conv1x1", True):
                yield _product(child, Epilogue(child.bias), norm)
            continue
        tail = fusion.tail_after(children, place + 1)
        if tail is not None and not child.training and not getattr(child, "conv1x1", True):
            yield _product(child, Epilogue(child.bias, tail.activation, tail.alpha, tail.values))
