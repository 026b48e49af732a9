"""Batch norms over a padded input, which divide by the rows that there are."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .... import hooks
from ...maps import rows
from ...ops.batch_norm import batch_norm_training
from .exact_operators import exact, of_rows_in_use
from .structures import Tensors


@contextlib.contextmanager
def counted_norms(model: nn.Module, tensors: Tensors) -> Iterator[None]:
    """Batch norms that know how many rows of a padded input there are, wherever they are called.

    What is fused with them stays so: those of torch's class remain such to whoever asks, and those that
    know by themselves are left alone.
    """
    forwards: list[tuple[nn.Module, Any]] = []
    try:
        for module in model.modules():
            if tensors.is_norm(module) and not (module.training and getattr(module, "_counts_rows", False)):
                forward = module.__dict__.get("forward")
                forwards.append((module, forward))
                own = forward or functools.partial(type(module).forward, module)
                module.__dict__["forward"] = types.MethodType(_in_place_of(module, own, tensors), module)
        yield
    finally:
        for module, forward in forwards:
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward


def _in_place_of(module: Any, forward: Any, tensors: Tensors) -> Any:
    """What a norm in a padded input computes, as a method. forward: its own; a method of ours, where a layer's features
    have shown that the kernels take this norm."""
    ours = hasattr(getattr(forward, "__func__", None), hooks.IN_PLACE_OF)

    def normalise(self: Any, input: Any) -> Any:
        if not (rows.in_scope() and (self.training or (self.running_mean is None and self.running_var is None))):
            return forward(input)
        if type(input) is torch.Tensor and exact() and not ours:
            return of_rows_in_use(forward, input)
        if isinstance(input, torch.Tensor):
            return batch_norm_training(self, input, False)
        features = tensors.features_of(input)
        assert features is not None
        return tensors.with_features(input, batch_norm_training(self, features, False))

    if type(module) is nn.BatchNorm1d:
        setattr(normalise, hooks.IN_PLACE_OF, nn.BatchNorm1d.forward)
    return normalise
