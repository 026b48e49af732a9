"""Sparse tensors of spconv to and from the form that all adapters share."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...core.conv.deferred import materialize
from ...core.geometry.sparse_data import SparseData
from ...errors import CoordinateError, DataTypeError, GeometryError, LifecycleError, require_type
from .tensors import shape_of


def to_core(x: Any) -> SparseData:
    """Features and coordinates of a `SparseConvTensor`, by reference.

    spconv keeps no tensor stride, so that is 1 per axis.
    Raises DataTypeError for other objects, ShapeError where rows and coordinates do not pair up.
    """
    if not any(base.__name__ == "SparseConvTensor" for base in type(x).__mro__):
        raise DataTypeError(f"expected a SparseConvTensor, got {type(x).__name__}.")
    shape = tuple(shape_of(x))
    return SparseData(materialize(x.features), x.indices, (1,) * len(shape), shape, int(x.batch_size))


def from_core(data: SparseData, like: Any = None) -> Any:
    """A `SparseConvTensor` of the spconv that is imported, real or stand-in.

    like: a `SparseConvTensor` to take grid, batch size and everything else from that `data` lacks;
        its kernel maps too, if `data` still has its index tensor.

    Without bounds in `data` or `like`, grid and batch size are the smallest that hold the
    coordinates.
    Raises LifecycleError when spconv is not there, CoordinateError for negative coordinates
    without bounds and rows outside those of `like`, GeometryError when `like` is of another dimension.
    """
    require_type("from_core", data, SparseData, "a SparseData, such as to_core gives")
    shape, batch_size = data.spatial_shape, data.batch_size
    if like is not None:
        if like.indices.shape[1] != data.coords.shape[1]:
            raise GeometryError(f"`like` has {like.indices.shape[1] - 1} axes, the data {data.dimension}.")
        shape = tuple(shape_of(like)) if shape is None else shape
        batch_size = int(like.batch_size) if batch_size is None else batch_size
        if data.coords is not like.indices and None in (data.spatial_shape, data.batch_size):
            data.check_inside(shape, batch_size)
    if shape is None or batch_size is None:
        smallest = _smallest(data.coords)
        shape = smallest[1:] if shape is None else shape
        batch_size = smallest[0] if batch_size is None else batch_size
    if like is None:
        return _class()(data.feats, data.coords, list(shape), max(1, batch_size))
    out = like.replace_feature(data.feats)
    out.spatial_shape, out.batch_size = list(shape), batch_size
    same_grid = out.spatial_shape == shape_of(like) and batch_size == int(like.batch_size)
    if data.coords is not like.indices or not same_grid:
        out.indices, out.indice_dict = data.coords, {}
    return out


def _class() -> Any:
    try:
        return importlib.import_module("spconv.pytorch").SparseConvTensor
    except ModuleNotFoundError as error:
        raise LifecycleError(
            f"a SparseConvTensor needs spconv ({error}); call sparse_bridge.enable('spconv') first."
        ) from None


def _smallest(coords: torch.Tensor) -> tuple[int, ...]:
    """Extents (batch first) of the smallest grid at the origin that holds `coords`."""
    if coords.shape[0] == 0:
        return (1,) * coords.shape[1]
    low, high = (bound.tolist() for bound in torch.aminmax(coords, dim=0))
    if min(low) < 0:
        axis = low.index(min(low))
        name = "the batch column" if axis == 0 else f"axis {axis - 1}"
        raise CoordinateError(f"{name} goes down to {low[axis]}; spconv's grids start at 0. Shift the coordinates.")
    return tuple(top + 1 for top in high)
