"""How the tensors and layers of a framework are read and made anew: one object per framework.

Fusion, conversion and replay work through it and name no framework. `of(x)` finds the framework
that an object belongs to. This file and the objects need torch; what does not is in `base`.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

from ..core.geometry.boxes import Box
from ..core.geometry.sparse_data import SparseData
from . import base


class TensorProtocol(abc.ABC):
    """What the shared parts of the bridge ask of one framework's tensors and layers.

    A sparse tensor has features [N, C], coordinates int32 [N, 1 + D] in the framework's own column
    order, and whatever else the framework keeps with it: grid, tensor stride, kernel maps.
    """

    @abc.abstractmethod
    def features_of(self, x: Any) -> torch.Tensor | None:
        """Features of a sparse tensor or of points; None for other objects of the framework."""

    @abc.abstractmethod
    def coordinates_of(self, x: Any) -> torch.Tensor:
        """Coordinates of a sparse tensor, the object that its kernel maps are known by."""

    @abc.abstractmethod
    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        """A sparse tensor like `x` with other features on the same rows, kernel maps included."""

    @abc.abstractmethod
    def to_core(self, x: Any) -> SparseData:
        """A sparse tensor as plain tensors, features by reference."""

    @abc.abstractmethod
    def from_core(self, data: SparseData, like: Any = None) -> Any:
        """The reverse.  like: a sparse tensor whose grid and kernel maps the result joins.

        Raises LifecycleError where the framework is not imported."""

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a sparse tensor or points of the framework."""
        return made_by(value.__class__) is self and self.features_of(value) is not None

    # layers

    def fused_inside(self, container: nn.Module) -> Iterable[nn.Module]:
        """Convolutions whose norm a container of the framework fuses by itself."""
        return ()

    # replay: inputs whose layers may be captured as a graph of launches

    def capture_box(self, x: Any) -> Box | None:
        """The cells that `x` may occupy, batch first, where a model over `x` may be captured; None
        where it may not, for instance because `x` has kernel maps already."""
        return None

    def with_rows(self, x: Any, features: torch.Tensor, coords: torch.Tensor) -> Any:
        """A sparse tensor like `x` with other rows, hence without kernel maps."""
        raise NotImplementedError

    def switches(self) -> Hashable:
        """What the framework's layers look at besides their arguments."""
        return None


@functools.lru_cache
def _root_of(kind: Any) -> str | None:
    """Name of the framework that defines a class itself, not a subclass of its classes."""
    root = kind.__module__.partition(".")[0]
    return next((f.name for f in base.frameworks() if root == f.packages[0]), None)


@functools.lru_cache
def made_by(kind: Any) -> TensorProtocol | None:
    """The protocol of the framework that defines a class or one that it derives from."""
    name = next((found for one in kind.__mro__ if (found := _root_of(one))), None)
    return None if name is None else base.load(name).tensors()


def of(x: Any) -> TensorProtocol | None:
    """The protocol of the framework that `x` is an object of."""
    return made_by(x.__class__)


def features_of(value: Any) -> torch.Tensor | None:
    """Features of a framework's tensor, or a plain tensor itself; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    found = made_by(value.__class__)
    return None if found is None else found.features_of(value)


def is_layer(module: nn.Module, torch_kind: type = nn.Module) -> bool:
    """Whether this is torch's own class, or the subclass that a framework makes of it.

    Subclasses that others made may compute something else.
    """
    kind: Any = type(module)
    return kind is torch_kind or (isinstance(module, torch_kind) and _root_of(kind) is not None)
