"""How the tensors and layers of a framework are read and made anew: one object per framework.

Fusion, conversion and replay work through it and name no framework. `of(x)` finds the framework
that an object belongs to. This file and the objects need torch; what does not is in `base`.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..core.device.torch_compat import allows_tf32
from ..core.geometry.boxes import Box
from ..core.geometry.data_bounds import Root
from ..core.geometry.sparse_data import SparseData
from ..core.maps.coordinate_map import CoordinateMap
from ..errors import SparseInputError, tensor_expected
from . import base


class LayerFacts(NamedTuple):
    """What a layer does, in a word; per axis, in the framework's order, its kernel and stride."""

    kind: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of_sizes(cls, category: str, kernel: Iterable[int], stride: Iterable[int]) -> LayerFacts:
        """category: "" for a convolution that only its sizes tell: pointwise, submanifold, strided."""
        sizes, steps = tuple(map(int, kernel)), tuple(map(int, stride))
        if not category:
            alike = "pointwise" if set(sizes) == {1} else "submanifold"
            category = alike if set(steps) == {1} else "strided"
        return cls(category, sizes, steps)


class Results(Protocol):
    """The levels of a replayed call, by those of the capture."""

    def at(self, coords: torch.Tensor, unwritten: bool = False) -> Any:
        """A sparse tensor without features over the level whose coordinates are these in the capture, or None.
        unwritten: and nobody has written to its coordinates since."""

    def recover(self, captured: Any) -> Any:
        """The tensor that is like `captured`, with all its maps, which the model computes once more. Raises
        RuntimeError where the coordinates of its input were written to."""


class Interchange(Protocol):
    """An adapter's `interchange.py`."""

    def to_core(self, x: Any) -> SparseData: ...

    def from_core(self, data: SparseData, like: Any = None) -> Any: ...


class TensorProtocol(abc.ABC):
    """What the shared parts of the bridge ask of one framework's tensors and layers.

    A sparse tensor has features [N, C], coordinates int32 [N, 1 + D] in the framework's own column
    order, and whatever else the framework keeps with it: grid, tensor stride, kernel maps.

    feature_names: attributes that hold the features, the one that programs set first.
    """

    feature_names: tuple[str, ...] = ("features",)

    def __init__(self, interchange: Interchange) -> None:
        self._interchange = interchange

    @abc.abstractmethod
    def features_of(self, x: Any) -> torch.Tensor | None:
        """Features of a sparse tensor or of points; None for other objects of the framework."""

    @abc.abstractmethod
    def coordinates_of(self, x: Any) -> torch.Tensor:
        """Coordinates of a sparse tensor, the object that its kernel maps are known by."""

    @abc.abstractmethod
    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        """A sparse tensor like `x` with other features on the same rows, kernel maps included."""

    def to_core(self, x: Any) -> SparseData:
        """A sparse tensor as plain tensors, features by reference."""
        return self._interchange.to_core(x)

    def from_core(self, data: SparseData, like: Any = None) -> Any:
        """The reverse.  like: a sparse tensor whose grid and kernel maps the result joins.

        Raises LifecycleError where the framework is not imported."""
        return self._interchange.from_core(data, like)

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a sparse tensor or points of the framework."""
        return made_by(value.__class__) is self and self.features_of(value) is not None

    # layers

    def describe(self, layer: nn.Module) -> LayerFacts | None:
        """Kind and sizes of a convolution or pool; None for other modules."""
        return None

    def is_norm(self, module: nn.Module) -> bool:
        """Whether this is torch's BatchNorm1d, or the framework's over its own tensors."""
        return is_layer(module, nn.BatchNorm1d)

    def is_own(self, module: nn.Module) -> bool:
        """Whether the class of a module is a framework's or torch's own."""
        module_class: Any = type(module)
        return root_of(module_class) is not None or module_class.__module__.startswith("torch.nn.")

    # replay: inputs whose layers may be captured as a graph of launches

    def capture_root(self, x: Any) -> Root | None:
        """The coordinates of `x` as requests for kernel maps are over, where a model over `x` may
        be captured; None where it may not."""
        return None

    def levels_of(self, x: Any) -> frozenset[Hashable]:
        """Names of the levels that the framework keeps with `x` beside its own, as layers look for them."""
        return frozenset()

    def is_fresh(self, x: Any) -> bool:
        """Whether no layer in front of `x` has left a level, or a kernel map that layers over it would not build."""
        return not self.levels_of(x)

    def over(self, x: Any, features: torch.Tensor, root: CoordinateMap) -> Any:
        """A sparse tensor like `x` over other coordinates, `root`, hence without kernel maps. Layers that look for one
        of another level that `x` has raise Refusal."""
        raise NotImplementedError

    def apart(self, x: Any, features: torch.Tensor) -> Any:
        """A sparse tensor with `features` over the coordinates of `x`, in the same grid, that shares no maps with it:
        what is done to `x` later does not reach it."""
        return self.with_features(x, features)

    def on_rows_of(self, x: Any, y: Any) -> bool:
        """Whether `y`, which a model made of `x`, has its rows: the coordinates of `x`."""
        return bool(self.coordinates_of(x).data_ptr() == self.coordinates_of(y).data_ptr())

    def label(self, x: Any) -> Hashable:
        """What `x` says of itself besides features and coordinates, by value."""
        return None

    def result(self, x: Any, y: Any, features: torch.Tensor, coords: torch.Tensor | None, box: Box | None) -> Any:
        """What a model would have made of `x` where it made `y` of another input, by its features
        and its coordinates (None: those of `x`). It has no kernel maps but those of `x`.

        box: of the coordinates, as the core has them, where that is not the one of `y`."""
        raise NotImplementedError

    def keep_for(self, y: Any, captured: Any, results: Results, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let layers find kernel maps and levels of `y`, a `result`, that its model made.  captured: what the result
        is like.  results: of the same call.  cut: makes the coordinates of a level of `captured` those of the call."""
        return

    def allows_tf32(self) -> bool:
        """Whether layers may round fp32 products to TF32 on a GPU."""
        return allows_tf32()

    def switches(self) -> Hashable:
        """What the framework's layers look at besides their arguments."""
        return None


@functools.lru_cache
def root_of(cls: Any) -> str | None:
    """Name of the framework that defines a class itself, not a subclass of its classes."""
    root = cls.__module__.partition(".")[0]
    return next((f.name for f in base.frameworks() if root == f.packages[0]), None)


@functools.lru_cache
def made_by(cls: Any) -> TensorProtocol | None:
    """The protocol of the framework that defines a class or one that it derives from."""
    name = name_of(cls)
    return None if name is None else of_framework(name)


def of_framework(name: str) -> TensorProtocol:
    """The protocol of a framework by its name: `PROTOCOL` in its adapter's `protocol.py`."""
    protocol: TensorProtocol = base.load(name).part("protocol").PROTOCOL
    return protocol


def name_of(cls: Any) -> str | None:
    """The framework that defines a class or one that it derives from."""
    return next((name for base_class in cls.__mro__ if (name := root_of(base_class))), None)


def of(x: Any) -> TensorProtocol | None:
    """The protocol of the framework that `x` is an object of."""
    return made_by(x.__class__)


def features_of(value: Any) -> torch.Tensor | None:
    """Features of a framework's tensor, or a plain tensor itself; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    framework = made_by(value.__class__)
    return None if framework is None else framework.features_of(value)


def missing_features(x: Any, caller: str) -> Exception:
    """The error of an object without features, or with an array in their place."""
    framework = of(x)
    for name in () if framework is None else framework.feature_names:
        if hasattr(x, name):
            return tensor_expected(getattr(x, name), name, caller)
    return SparseInputError(f"{caller} takes a sparse tensor, got {type(x).__name__}.")


def n_layers(module: nn.Module) -> int:
    """How many layers with a kernel a module has, of whatever framework."""
    count = 0
    for submodule in module.modules():
        module_class: Any = type(submodule)
        if root_of(module_class) is not None:
            weights = submodule._parameters.values()
            count += any(parameter is not None and parameter.ndim >= 2 for parameter in weights)
    return count


def is_layer(module: nn.Module, torch_class: type = nn.Module) -> bool:
    """Whether this is torch's own class, or the subclass that a framework makes of it.

    Subclasses that others made may compute something else.
    """
    module_class: Any = type(module)
    return module_class is torch_class or (isinstance(module, torch_class) and root_of(module_class) is not None)
