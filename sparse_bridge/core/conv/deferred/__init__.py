"""Features of deferred convolutions, as tensors: for code that takes features out of a sparse
tensor, normalises, adds or activates them, and puts them back.

Those operations go to the convolution. Everything else that is done with the tensor sees
what the convolution computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ....hooks import BATCH_NORM
from ..activations import ACTIVATIONS, Activation
from ..epilogue import Norm
from .conv import DeferredConv, MaybeDeferred
from .features import FOLLOWING, KINDS, features_of, materialize
from .shortcuts import ProfiledFeatures, install_fast_forward, reset

__all__ = ["ProfiledFeatures", "features_of", "materialize", "reset"]


def _then(x: Any, inplace: bool, follow: Callable[[DeferredConv], MaybeDeferred]) -> torch.Tensor:
    """Features behind one step more; in place, all who hold `x` see them."""
    result = follow(x.conv)
    if not inplace:
        return features_of(result)
    if type(result) is DeferredConv:
        x.conv = result
        return x  # type: ignore[no-any-return]
    x.conv.replace_result(result)
    return result  # type: ignore[return-value]


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor | None:
    if training or type(input) not in KINDS or running_mean is None or running_var is None:
        return None
    install_fast_forward(input)
    return features_of(
        input.conv.normed(
            Norm(running_mean, running_var, weight, bias, eps),
            lambda y: BATCH_NORM(y, running_mean, running_var, weight, bias, False, momentum, eps),
        )
    )


def _activation(activation: Activation, always_in_place: bool) -> Callable[..., torch.Tensor]:
    name, apply, apply_, arguments = activation.name, activation.apply, activation.apply_, activation.arguments

    def follow(input: Any, *options: Any, **named_options: Any) -> torch.Tensor:
        install_fast_forward(input)
        alpha, inplace = arguments(*options, **named_options)
        if inplace or always_in_place:
            return _then(input, True, lambda conv: conv.activated(name, alpha, lambda y: apply_(y, alpha)))
        return features_of(input.conv.activated(name, alpha, lambda y: apply(y, alpha)))

    return follow


def _add(input: Any, other: Any, **unusual: Any) -> torch.Tensor | None:
    if unusual:
        return None
    if type(input) not in KINDS:
        input, other = other, input
    if other is input or not isinstance(other, torch.Tensor):
        return None
    rows = materialize(other) if type(other) in KINDS else other
    return features_of(input.conv.plus(rows, lambda y: y + rows))


def _add_(input: Any, other: Any, **unusual: Any) -> torch.Tensor | None:
    if unusual or type(input) not in KINDS or other is input:
        return None
    if not isinstance(other, torch.Tensor):
        return None
    rows = materialize(other)
    return _then(input, True, lambda conv: conv.plus(rows, lambda y: y.add_(rows)))


FOLLOWING.update(
    {
        F.batch_norm: _batch_norm,
        torch.add: _add,
        torch.Tensor.add: _add,
        torch.Tensor.__add__: _add,
        torch.Tensor.__radd__: _add,
        torch.Tensor.add_: _add_,
        torch.Tensor.__iadd__: _add_,
    }
)
for _row in ACTIVATIONS.values():
    FOLLOWING.update(dict.fromkeys(_row.calls, _activation(_row, False)))
    FOLLOWING.update(dict.fromkeys(_row.calls_, _activation(_row, True)))
