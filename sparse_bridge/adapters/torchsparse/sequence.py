"""`torch.nn.Sequential` over sparse tensors: norms and activations in the convolution's own store.

torchsparse has no container of its own; its networks put `Conv3d`, `BatchNorm` and `ReLU` into
torch's. In inference they become one operation there, where nobody could notice but by the clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ... import hooks
from ..base import Patch
from ..fusion import EpilogueLayers, activation_of, foldable
from ..protocol import is_layer
from ..warmup_registry import Expected, expect
from . import conv

__all__ = ["expected", "sequential_patches"]


def sequential_patches() -> list[Patch]:
    """torch.nn.Sequential looks ahead where it is given a sparse tensor, and tells the warm-up
    what it will ask for."""

    def running(original: Any) -> Any:
        def forward(self: Any, input: Any) -> Any:
            if isinstance(input, torch.Tensor) or not hasattr(input, "feats"):
                return original(self, input)
            fusing = hooks.inference() and not hooks.torch_replaced()
            return _run(list(self), input) if fusing else original(self, input)

        return forward

    def adding(original: Any) -> Any:
        def add_module(self: Any, name: str, module: Any) -> None:
            original(self, name, module)
            if hasattr(type(module), "convolves_alone"):
                expect(self, expected)

        return add_module

    reason = "torchsparse's networks keep convolutions, norms and activations in torch's container"
    return [
        Patch(nn.Sequential, "forward", running, reason, ">=2.4", wraps=True),
        Patch(nn.Sequential, "add_module", adding, reason, ">=2.4", wraps=True),
    ]


def expected(container: nn.Module) -> Iterator[Expected]:
    """The products of a container that end in a norm and an activation; those of kernel volume 1
    do not, see `_run`."""
    children = list(container.children())
    for index, layer in enumerate(children):
        following = layers_after(children, index + 1) if hooks.inference() and _bare(layer) else None
        if following is not None:
            for product in conv.expected(layer):
                if product.pointwise:
                    continue
                yield dataclasses.replace(product, epilogue=following.epilogue(product.epilogue.bias))


def _run(children: Sequence[Any], x: Any) -> Any:
    """What the children make of a sparse tensor, one after another."""
    index = 0
    while index < len(children):
        module = children[index]
        index += 1
        following = layers_after(children, index) if _bare(module) else None
        if following is not None:
            kernel, bias, spec, config = module.arguments()
            if not spec.pointwise:  # a plain matrix product
                x = conv.convolve(x, kernel, bias, spec, config, following)
                index += following.length()
                continue
        x = module(x)
    return x


def layers_after(modules: Sequence[nn.Module], index: int) -> EpilogueLayers | None:
    """The norm at `modules[index]` and perhaps an activation, if both are the framework's own, the
    norm in eval mode."""
    if index >= len(modules):
        return None
    norm = modules[index]
    if not isinstance(norm, nn.BatchNorm1d) or not _own(norm, nn.BatchNorm1d):
        return None
    if not foldable(norm):
        return None
    following = modules[index + 1] if index + 1 < len(modules) else None
    activation = None if following is None else activation_of(following)
    if activation is None or following is None or not (_own(following, nn.Module) and hooks.plain(following)):
        return EpilogueLayers(norm)
    return EpilogueLayers(norm, *activation)


def _bare(module: nn.Module) -> bool:
    """Whether a call of this module is a convolution and nothing else."""
    convolves = getattr(type(module), "convolves_alone", None)
    return convolves is not None and convolves(module) and hooks.plain(module)


def _own(module: nn.Module, torch_class: type[nn.Module]) -> bool:
    """Whether the class is the framework's, and so is its forward."""
    module_class = type(module)
    return is_layer(module, torch_class) and module_class.forward.__module__ == module_class.__module__
