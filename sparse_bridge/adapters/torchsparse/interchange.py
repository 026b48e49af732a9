"""Sparse tensors of torchsparse to and from the form that all adapters share."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...core.geometry.sparse_data import SparseData, check_multiples
from ...errors import DataTypeError, GeometryError, LifecycleError, OverflowLimitError, require_type
from . import profile as profiles
from .records import same_rows
from .spec import Triple, triple
from .tensors import check_input, range_of


def to_core(x: Any) -> SparseData:
    """Features and sites of a `SparseTensor`; releases before 2.1 multiply sites by the stride.

    Raises DataTypeError for other objects, ShapeError where rows and sites do not pair up.
    """
    if not any(base.__name__ == "SparseTensor" for base in type(x).__mro__):
        raise DataTypeError(f"expected a torchsparse.SparseTensor, got {type(x).__name__}.")
    feats, coords = check_input(x, "to_core")
    release = profiles.current()
    stride = triple(x.stride, "the tensor stride")
    rows = coords
    if not release.batch_first:
        rows = torch.div(coords[:, [3, 0, 1, 2]], _steps(stride, coords.device), rounding_mode="floor")
    grid = range_of(x)
    shape = None if grid is None else grid[1:4]
    return SparseData(feats, rows, stride, shape, None if grid is None else int(grid[0]))


def _steps(stride: Triple, device: torch.device) -> torch.Tensor:
    if max(stride) >= 1 << 31:
        raise OverflowLimitError(
            f"tensor stride {stride}; sites of 32 bits take at most {(1 << 31) - 1}. Use smaller strides."
        )
    return torch.tensor([1, *stride], dtype=torch.int32, device=device)


def from_core(data: SparseData, like: Any = None) -> Any:
    """A `SparseTensor` of the torchsparse that is imported, real or stand-in.

    like: a SparseTensor whose caches are shared where the sites are the same.
    Releases before 2.1 multiply sites by the stride; where `data` has no spatial shape to tell that they fit, the
    device is waited for.
    Raises LifecycleError when torchsparse is not there, GeometryError for other than three axes,
    CoordinateError and OverflowLimitError for sites and strides that leave int32.
    """
    require_type("from_core", data, SparseData, "a SparseData, such as to_core gives")
    if data.dimension != 3:
        raise GeometryError(f"torchsparse has three axes, the data {data.dimension}.")
    try:
        tensor_class = importlib.import_module("torchsparse.tensor").SparseTensor
    except ImportError as error:
        raise LifecycleError(
            "torchsparse is neither installed nor enabled; call sparse_bridge.enable('torchsparse')."
        ) from error
    release = profiles.current()
    stride = triple(data.tensor_stride, "the tensor stride")
    coords = data.coords
    if not release.batch_first:
        steps = _steps(stride, coords.device)
        extent = (1 << 31,) * 3 if data.spatial_shape is None else data.spatial_shape
        if any(s > 1 and size * s > 1 << 31 for size, s in zip(extent, stride, strict=True)):
            check_multiples(coords, stride)
        coords = (coords * steps)[:, [1, 2, 3, 0]].contiguous()
    if like is not None and stride == like.stride and same_rows(coords, like.coords):
        coords = like.coords
    out = tensor_class(data.feats, coords, stride)
    if data.spatial_shape is not None and data.batch_size is not None and release.divides:
        out.spatial_range = (data.batch_size, *data.spatial_shape)
    if like is not None and coords is like.coords:
        if hasattr(like, "_caches"):
            out._caches = like._caches
        else:
            out.cmaps, out.kmaps = like.cmaps, like.kmaps
    return out
