"""Sparse tensors whose features are computed when they are first read.

How a framework's class uses it:

    class SparseTensor(LazyFeatures):       # features_attribute = where it keeps them

and where it makes one of given features, `keep(made, features)` stores them, whether they are a
tensor or a deferred convolution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..core.conv.deferred.conv import DeferredConv
from ..core.device.torch_compat import apart, eagerly
from ..core.geometry.sparse_data import brief


class LazyFeatures:
    """A sparse tensor whose features may be computed when they are first read.

    features_attribute: where it keeps them, which is empty until then; features_in_slot: that is a
    slot, and so must be `_late`. It holds what is to be computed (an object with `materialize()`),
    or what made the features that are there.  _with: makes a tensor like it with other features.
    """

    __slots__ = ()
    features_attribute: str
    features_in_slot = False
    _with: Callable[..., Any]
    _late: Any

    @eagerly
    def __getattr__(self, name: str) -> Any:  # asked only for what is not there
        if name == "_late":
            return None
        late = self._late if name == self.features_attribute else None
        if late is not None and torch.compiler.is_compiling():
            return apart(_read, self)
        if late is not None and hasattr(late, "materialize"):
            features = late.materialize()
            setattr(self, name, features)
            _forget(self)
            return features
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if torch.compiler.is_compiling():  # which take no keywords here
            raise AttributeError(text)
        own = getattr(type(self), name, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)  # it has raised an AttributeError, which Python drops for this call
        raise AttributeError(text, name=name, obj=self)

    def __reduce_ex__(self, version: Any) -> Any:
        """Copies and pickles have features."""
        getattr(self, self.features_attribute, None)
        _forget(self)
        return super().__reduce_ex__(version)


def _read(x: LazyFeatures) -> torch.Tensor:
    """x's features, which are there from now on and are not deferred."""
    features: torch.Tensor = getattr(x, x.features_attribute)
    _forget(x)
    return features


def _forget(x: LazyFeatures) -> None:
    with contextlib.suppress(AttributeError):
        object.__delattr__(x, "_late")


@eagerly
def keep(x: Any, features: torch.Tensor | DeferredConv) -> None:
    """Make `features` those of `x`, which has none."""
    if type(features) is not DeferredConv:
        setattr(x, x.features_attribute, features)
        return
    if features.result is not None:
        setattr(x, x.features_attribute, features.result)
    if features.result is None or features.follows:
        x._late = features


@eagerly
def replace(x: Any, features: torch.Tensor | DeferredConv) -> None:
    """The same for a tensor that has features already."""
    if type(features) is torch.Tensor:
        setattr(x, x.features_attribute, features)
        x._late = None
        return
    with contextlib.suppress(AttributeError):
        object.__delattr__(x, x.features_attribute)
    keep(x, features)


def take(x: LazyFeatures, *types: type) -> Any:
    """What made x's features or is to make them, taken off it, if it is of one of these types."""
    late = x._late
    if not isinstance(late, types):
        return None
    _forget(x)
    return late


def has_features(x: LazyFeatures) -> bool:
    """Whether they are there."""
    try:
        object.__getattribute__(x, x.features_attribute)
    except AttributeError:
        return False
    return True


@eagerly
def deferred_of(x: Any) -> DeferredConv | None:
    """The convolution whose result x's features are, if it is deferred, or computed to learn what follows."""
    late = getattr(x, "_late", None)
    if type(late) is not DeferredConv:
        return None
    if torch.compiler.is_compiling():
        if late.result is None:
            apart(_read, x)
        return None
    if x.features_in_slot:
        try:
            features = object.__getattribute__(x, x.features_attribute)
        except AttributeError:
            return late
    else:  # a look that raises takes ten times as long
        features = x.__dict__.get(x.features_attribute)
        if features is None:
            return late
    return late if features is late.result and late.follows else None


def brief_features(x: LazyFeatures) -> str:
    """Shape, dtype and device of x's features; computes nothing."""
    conv = deferred_of(x)
    if conv is None and not has_features(x):
        return "not computed yet"
    return brief(getattr(x, x.features_attribute) if conv is None else conv)
