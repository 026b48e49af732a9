"""Norms of torch that are called on the features of layers in training, by the kernels of
`batch_norm`: two launches each way instead of five and more.

`norm(x.features)` is a call of torch's own module on a plain tensor. So features of a layer's first
calls tell which module that is (`deferred.ProfiledFeatures`), and the module gets a method of its
own as forward, as in inference. Whatever is unusual goes to torch's. So does what a checkpoint
computes twice: it counts what is saved for the backward pass, which has to be the same both times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from ... import hooks, settings
from ..conv import deferred
from ..conv.deferred import shortcuts
from ..conv.history import histories, history_of
from ..device.torch_compat import SAVED_TENSORS_HOOKS
from .batch_norm import batch_norm_training, serves


def profiled(layer: Any, y: torch.Tensor) -> torch.Tensor:
    """The features y [N, C], any float dtype, of `layer` in training: of its first calls, such that their norm is
    found. A view of a class of its own then, else y itself."""
    if torch.compiler.is_compiling():
        return y
    entry = histories.get(id(layer))
    if entry is not None and entry[1].norm_calls.over and entry[0]() is layer:
        return y
    calls = history_of(layer).norm_calls
    if not (y.requires_grad and _usual(y)):
        return y
    calls.due()
    features = y.as_subclass(deferred.ProfiledFeatures)
    features.plain = y
    return features


def _usual(x: torch.Tensor) -> bool:
    """Whether kernels may normalise these features, and nobody watches or repeats what is done."""
    return (
        type(x) is torch.Tensor
        and settings.get().optimize != "off"
        and serves(x) is not None
        and not hooks.traced()
        and not torch._C._functorch.peek_interpreter_stack()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and forward_ad._current_level < 0
        and SAVED_TENSORS_HOOKS is not None
        and SAVED_TENSORS_HOOKS(False) is None
    )


def _normalised(norm: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What a BatchNorm1d in training makes of x; None where torch's own is to compute it."""
    if not norm.training or type(norm) is not nn.BatchNorm1d:
        return None
    if len(norm._parameters) != 2 or len(norm._buffers) != 3 or not _usual(x):
        return None
    return batch_norm_training(norm, x, False)


shortcuts.in_training = _normalised
