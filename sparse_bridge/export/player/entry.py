"""What goes into a model: features and coordinates, or one sparse tensor of a framework, which is taken apart."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...adapters import protocol
from ...core.conv.deferred import materialize
from ...core.geometry.boxes import Box
from ...core.geometry.data_bounds import DataBounds
from ...core.maps.coordinate_map import CoordinateMap
from ..plugin_checks import ExportError

_FEATURES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Entry:
    """features [N, C] and coords int32 [N, 1 + D] of an example, as a program hands them over.

    names: of coordinates and features.  order: the columns of the coordinates, as the core has them.  box: of the
    coordinates; None: the framework's tensor has none, or the model says.  call: the model as a function of
    features, coordinates, and the coordinates as the core has them.  tf32: layers may round fp32 products so.
    """

    names: tuple[str, str]
    features: torch.Tensor
    coords: torch.Tensor
    order: tuple[int, ...]
    call: Callable[[torch.Tensor, torch.Tensor, Callable[[], CoordinateMap]], Any]
    box: Box | None = None
    tf32: bool = False

    @property
    def reordered(self) -> bool:
        """Whether the core has the columns in another order."""
        return self.order != tuple(range(len(self.order)))

    def over(self, features: torch.Tensor, coords: torch.Tensor) -> Any:
        """What the model returns for an input: plain tensors."""

        def root() -> CoordinateMap:
            own = coords[:, list(self.order)].contiguous()
            return CoordinateMap(own, self.box or DataBounds(own))

        return self.call(features, coords, root)


def require_playable(scenes: Sequence[Entry], rows: int) -> None:
    """Raises ExportError unless a player takes these scenes, the example first, with memory for `rows` rows."""
    features = scenes[0].features
    if features.dtype not in _FEATURES:
        raise ExportError(
            f"features are {features.dtype}; expected {', '.join(map(str, _FEATURES))}. Cast the model, too."
        )
    if not len(features):
        raise ExportError("the example has no rows; expected a scene as they come: deeper levels get rows by it.")
    for scene, label in zip(scenes, _labels(), strict=False):
        n_rows, n_distinct = len(scene.coords), len(torch.unique(scene.coords, dim=0))
        if n_rows > rows:
            raise ExportError(f"rows is {rows}; expected at least the {n_rows} rows of {label}.")
        if n_distinct < n_rows:
            raise ExportError(
                f"{n_rows - n_distinct} of {n_rows} rows of {label} repeat the coordinates of an earlier row; a GPU "
                "package takes distinct ones. Merge such rows before."
            )


def require_inside(scenes: Sequence[Entry], box: Box) -> None:
    """Raises ExportError for scenes, the example first, with rows outside of the grid."""
    first, end = torch.tensor(box.lo), torch.tensor([low + size for low, size in zip(box.lo, box.size, strict=True)])
    for scene, label in zip(scenes, _labels(), strict=False):
        own = scene.coords[:, list(scene.order)]
        n_outside = int(((own < first) | (own >= end)).any(1).sum())
        if n_outside:
            raise ExportError(
                f"{n_outside} of {len(own)} rows of {label} lie outside of the grid of the model, {list(box.size[1:])} "
                f"with {box.size[0]} batch items. Leave them out, or enlarge the grid."
            )


def _labels() -> Iterator[str]:
    yield "the example"
    for number in itertools.count(1):
        yield f"scene {number}"


def entry_of(model: nn.Module, inputs: Sequence[Any]) -> Entry:
    """The entry of a model by its inputs: features and int32 coordinates in any order, or a sparse tensor.

    Raises ExportError.
    """
    framework = protocol.of(inputs[0]) if len(inputs) == 1 else None
    if framework is not None and framework.is_tensor(inputs[0]):
        return _of_sparse(model, inputs[0], framework)
    features_at, coords_at = _places(inputs)
    coords = inputs[coords_at]
    own = list(inspect.signature(model.forward).parameters)
    names = (own[coords_at], own[features_at]) if len(own) > 1 else ("coords", "features")  # *inputs has none

    def call(features: torch.Tensor, coords: torch.Tensor, root: Callable[[], CoordinateMap]) -> Any:
        return flattened(model(features, coords) if coords_at == 1 else model(coords, features))

    return Entry(names, inputs[features_at], coords, tuple(range(coords.shape[1])), call)


def _places(inputs: Sequence[Any]) -> tuple[int, int]:
    """(which input holds the features, which one the coordinates)."""
    tensors = [value if isinstance(value, torch.Tensor) else torch.empty(0) for value in inputs]
    floats = [i for i, value in enumerate(tensors) if value.is_floating_point() and value.ndim == 2]
    whole = [i for i, value in enumerate(tensors) if value.dtype == torch.int32 and value.ndim == 2]
    if len(inputs) != 2 or len(floats) != 1 or len(whole) != 1 or len(inputs[0]) != len(inputs[1]):
        described = ", ".join(
            f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
            for value in inputs
        )
        raise ExportError(
            f"the model's inputs are {described}; a GPU package takes features [N, C] and int32 coordinates "
            "[N, 1 + D] of the same rows, or one sparse tensor."
        )
    return floats[0], whole[0]


def _of_sparse(model: nn.Module, x: Any, framework: protocol.TensorProtocol) -> Entry:
    features, coords = framework.features_of(x), framework.coordinates_of(x)
    root = framework.capture_root(x)
    if root is None or features is None or not framework.is_fresh(x):
        raise ExportError(
            f"the example is a {type(x).__name__} that layers have seen, or that holds points; expected one that was "
            "just made, of a voxel each row."
        )
    columns = range(coords.shape[1])
    orders = [order for order in itertools.permutations(columns) if torch.equal(root.coords, coords[:, list(order)])]
    if not orders:
        raise ExportError(
            f"the coordinates of the {type(x).__name__} are not those that layers search, as with a tensor stride "
            "above 1; a GPU package takes an input at stride 1."
        )
    if len(orders) > 1:
        raise ExportError("two columns of the example's coordinates are equal; expected a scene that fills its axes.")

    def call(features: torch.Tensor, coords: torch.Tensor, root: Callable[[], CoordinateMap]) -> Any:
        return flattened(model(framework.over(x, features, root())))

    box = None if isinstance(root.bounds, DataBounds) else root.bounds
    names = ("coords", "features")
    return Entry(names, features, coords.int(), orders[0], call, box, framework.allows_tf32())


def flattened(result: Any) -> Any:
    """The same, with sparse tensors as their features and coordinates."""
    return pytree.tree_map(_parts, result)


def _parts(value: Any) -> Any:
    framework = protocol.of(value)
    if framework is None or not framework.is_tensor(value):
        return value
    return materialize(framework.features_of(value)), framework.coordinates_of(value)
