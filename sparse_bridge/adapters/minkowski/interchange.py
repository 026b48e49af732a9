"""Sparse tensors of MinkowskiEngine to and from the form that all adapters share."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...core.geometry.sparse_data import SparseData
from ...errors import CoordinateError, DataTypeError, GeometryError, LifecycleError, require_type
from .batches import batches
from .maps import MapRegistry
from .strides import check_tensor_stride


def _step(stride: Any) -> tuple[int, ...]:
    return tuple(max(1, int(s)) for s in stride)


def to_core(x: Any) -> SparseData:
    """Features (by reference) and cells of a MinkowskiEngine SparseTensor.

    The batch size is that of its coordinate manager, empty items included.
    Raises: DataTypeError (another object), CoordinateError (coordinates that are no multiples of
        the tensor stride).
    """
    if not hasattr(x, "coordinate_map_key"):
        raise DataTypeError(f"expected a MinkowskiEngine SparseTensor, got {type(x).__name__}.")
    coords, step = x._sites(), _step(x.tensor_stride)
    if any(s > 1 for s in step):
        spacing = coords.new_tensor((1, *step))
        if bool((coords % spacing).any()):
            raise CoordinateError(
                f"coordinates are not multiples of the tensor stride {list(step)}, so they are no "
                "cells of a coarser grid."
            )
        coords = torch.div(coords, spacing, rounding_mode="floor")
    present = batches(x.coordinate_manager._manager)
    batch_size = int(present[-1]) + 1 if len(present) else 0
    return SparseData(x.F, coords, tuple(x.tensor_stride), None, batch_size)


def from_core(data: SparseData, like: Any = None) -> Any:
    """A SparseTensor of the MinkowskiEngine that is imported.

    like: a SparseTensor whose coordinate manager the result joins; and its coordinate map too, if
        the coordinates are the same, so that both may be added or concatenated.

    Raises: LifecycleError (MinkowskiEngine is not there), CoordinateError (rows that share a
        coordinate: this framework has none; or that leave int32 when they are multiplied with the
        tensor stride), GeometryError (`like` of another dimension), and what `check_tensor_stride` does.
    """
    require_type("from_core", data, SparseData, "a SparseData, such as to_core gives")
    framework = _framework()
    check_tensor_stride(tuple(data.tensor_stride))
    coords, spaced = data.coords.contiguous(), max(data.tensor_stride) > 1
    if spaced:
        coords = coords.long() * coords.new_tensor((1, *_step(data.tensor_stride)))
    if like is None:
        managers = importlib.import_module("MinkowskiEngine.MinkowskiCoordinateManager")
        manager = managers.new_manager(data.dimension, coords, None, None)
    else:
        manager = like.coordinate_manager
        if data.dimension != like.D:
            raise GeometryError(f"`like` has {like.D} axes, the data {data.dimension}.")
        if list(data.tensor_stride) == like.tensor_stride and torch.equal(like._sites().to(coords.dtype), coords):
            return framework.SparseTensor(
                data.feats, coordinate_map_key=like.coordinate_map_key, coordinate_manager=manager
            )
    registry: MapRegistry = manager._manager
    key, first, _ = registry.insert(coords, tuple(data.tensor_stride), aligned=spaced)
    if first is not None:
        del registry.grids[key]
        raise CoordinateError(
            f"{len(coords) - len(first)} rows share a coordinate with another row; MinkowskiEngine "
            "keeps one row per coordinate. Sum or drop them first."
        )
    return framework.SparseTensor(
        data.feats, coordinate_map_key=framework.CoordinateMapKey(list(key[0]), key[1]), coordinate_manager=manager
    )


def _framework() -> Any:
    try:
        return importlib.import_module("MinkowskiEngine")
    except ModuleNotFoundError as error:
        raise LifecycleError(
            f"a SparseTensor needs MinkowskiEngine ({error}); call sparse_bridge.enable('minkowski') first."
        ) from None
