"""Operators that build the maps of `core.functional`. Handles stand for the engine's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import GeometryError
from ..geometry.offsets import Offsets
from ..maps.coordinate_map import CoordinateMap
from . import handles
from .coordinates import check_rows
from .library import define
from .originals import functions

Expanded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _map(handle: torch.Tensor) -> CoordinateMap:
    return handles.value_of(handle, CoordinateMap)


def _offsets(flat: Sequence[int], dimension: int) -> Offsets:
    if len(flat) % dimension:
        raise GeometryError(f"kernel offsets of another dimension on {dimension}-dimensional coordinates.")
    return Offsets.of([flat[at : at + dimension] for at in range(0, len(flat), dimension)])


def _steps(stride: Sequence[int]) -> Any:
    return stride[0] if len(stride) == 1 else stride


def _coordinate_map(
    coords: torch.Tensor, spatial_shape: Sequence[int] | None, batch_size: int | None, outside: str
) -> torch.Tensor:
    own = coords.clone()  # graphs write into memory that they need no more
    cmap = functions["coordinate_map"](own, spatial_shape, batch_size, outside=outside)
    return handles.make(cmap)


def _submanifold(handle: torch.Tensor, offsets: Sequence[int], dimension: int) -> torch.Tensor:
    return handles.make(functions["submanifold"](_map(handle), _offsets(offsets, dimension)))


def _expanded(
    coords: torch.Tensor,
    handle: torch.Tensor,
    offsets: Sequence[int],
    dimension: int,
    stride: Sequence[int],
    out_shape: Sequence[int] | None,
    kind: str,
    least: int,
) -> Expanded:
    arguments = _map(handle), _offsets(offsets, dimension), _steps(stride), out_shape
    outer, kmap = functions[kind](*arguments)
    check_rows(outer.n_rows, least)
    return handles.make(kmap), outer.coords.clone(), handles.make(outer)


def _fake_expanded(coords: torch.Tensor, *arguments: Any) -> Expanded:
    n_rows = torch.library.get_ctx().new_dynamic_size(min=arguments[-1])
    return handles.like(), coords.new_empty((n_rows, coords.shape[1])), handles.like()


def _between(
    x_map: torch.Tensor, y_map: torch.Tensor, offsets: Sequence[int], dimension: int, stride: Sequence[int]
) -> torch.Tensor:
    maps = _map(x_map), _map(y_map)
    return handles.make(functions["between"](*maps, _offsets(offsets, dimension), _steps(stride)))


def _of_pairs(x_rows: Sequence[torch.Tensor], y_rows: Sequence[torch.Tensor], n_in: int, n_out: int) -> torch.Tensor:
    pairs = [(x.clone(), y.clone()) for x, y in zip(x_rows, y_rows, strict=True)]
    return handles.make(functions["kernel_map"](pairs, n_in, n_out))


def _handle(*ignored: Any) -> torch.Tensor:
    return handles.like()


_KERNEL = "int[] offsets, int dimension"
define(
    "coordinate_map",
    "(Tensor coords, int[]? spatial_shape, int? batch_size, str outside) -> Tensor",
    _coordinate_map,
    _handle,
)
define("submanifold_map", f"(Tensor handle, {_KERNEL}) -> Tensor", _submanifold, _handle)
define(
    "expanded_map",
    f"(Tensor coords, Tensor handle, {_KERNEL}, int[] stride, int[]? out_shape, str kind, "
    "int least) -> (Tensor, Tensor, Tensor)",
    _expanded,
    _fake_expanded,
)
define("map_between", f"(Tensor x_map, Tensor y_map, {_KERNEL}, int[] stride) -> Tensor", _between, _handle)
define("map_of_pairs", "(Tensor[] x_rows, Tensor[] y_rows, SymInt n_in, SymInt n_out) -> Tensor", _of_pairs, _handle)
