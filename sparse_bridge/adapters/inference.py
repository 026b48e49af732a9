"""Norms, activations and sums of sparse tensors in inference: part of the convolution before them
where that is deferred (`core.conv.deferred.conv`), else torch's own operations.

For stand-ins, whose tensors are `LazyFeatures`. What these functions return becomes the features of
a new tensor with `lazy_features.keep`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.conv.deferred.conv import DeferredConv
from ..core.device.torch_compat import eagerly
from . import fusion, protocol
from .lazy_features import LazyFeatures, deferred_of, replace

Features = torch.Tensor | DeferredConv
# A program may put others there.
_ADD, _ADD_, _IADD = torch.Tensor.__add__, torch.Tensor.add_, torch.Tensor.__iadd__


@eagerly
def normed(norm: nn.BatchNorm1d, run: Callable[..., torch.Tensor], x: Any) -> Features:
    """What a BatchNorm1d in eval mode makes of x's features; `run` as of `is_training_norm`."""
    conv = deferred_of(x)
    if conv is None:
        return fusion.batch_norm_inference(norm, run, _rows(x))
    values = fusion.foldable_values(norm, run)
    if values is None:
        return fusion.batch_norm_inference(norm, run, _rows(x))
    return conv.normed(values, lambda y: fusion.batch_norm_inference(norm, run, y))


@eagerly
def activated(conv: DeferredConv, form: tuple[str, float], inplace: bool, alone: Any, x: Any) -> Any:
    """Behind an activation that kernels apply, of x whose features `conv` makes.

    form: name and slope.  alone(features) computes it; inplace: in x's own features, too.
    """
    features = conv.activated(*form, alone)
    if inplace:
        replace(x, features)
    return features


@eagerly
def plus(a: Any, b: Any, inplace: bool = False) -> Features:
    """The sum of the features of two sparse tensors with the same rows.

    inplace: in a's own features, too.
    """
    conv, other = deferred_of(a), b
    if conv is None and not inplace and deferred_of(b) is not None:
        conv, other = deferred_of(b), a
    tensor: Any = torch.Tensor
    if conv is None or tensor.__add__ is not _ADD or tensor.add_ is not _ADD_ or tensor.__iadd__ is not _IADD:
        if not inplace:
            return _rows(a) + _rows(b)
        features = operator.iadd(_rows(a), _rows(b))
        replace(a, features)
        return features
    y = _rows(other)
    features = conv.plus(y, (lambda x: x.add_(y)) if inplace else (lambda x: x + y))
    if inplace:
        replace(a, features)
    return features


@eagerly
def shape_of(x: Any) -> Any:
    """Of the features, which need not be there."""
    conv = deferred_of(x)
    return _rows(x).shape if conv is None else conv.shape


def _rows(x: Any) -> torch.Tensor:
    if isinstance(x, LazyFeatures):
        features: torch.Tensor = getattr(x, x.features_attribute)
        return features
    framework = protocol.of(x)
    rows = None if framework is None else framework.features_of(x)
    if rows is None:
        raise protocol.missing_features(x, "the operation")
    return rows
