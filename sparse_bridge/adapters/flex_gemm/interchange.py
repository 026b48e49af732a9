"""FlexGEMM's plain tensors to and from the form that all adapters share.

FlexGEMM has no tensor class: what travels is a tuple (features, coordinates, shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.arguments import expect_tensors
from ...core.geometry.sparse_data import SparseData, brief
from ...errors import GeometryError, require_type
from . import profile
from .arguments import shape_entries
from .geometry import check_coords, grid_shape

_DIMENSIONS = 2, 3, 4  # of 2.0


class Voxels(NamedTuple):
    """The first three arguments of FlexGEMM's functions: features [N, C], coordinates int32 [N, 1 + D], batch
    first, and the shape of the generation in force: (batch, C, S1, S2, S3), in 2.0 (batch, S1 .. SD, C)."""

    feats: torch.Tensor
    coords: torch.Tensor
    shape: torch.Size

    def __repr__(self) -> str:
        shape = list(self.shape)
        return f"Voxels(feats={brief(self.feats)}, coords={brief(self.coords)}, shape={shape})"


def to_core(x: Any) -> SparseData:
    """Features and coordinates of a `Voxels` (or any tuple of its three). Raises ShapeError,
    DataTypeError, ArgumentValueError."""
    feats, coords, shape = x
    if not _channels_last():
        batch, _, extents = grid_shape(shape)
        return SparseData(feats, check_coords(coords, "to_core"), (1, 1, 1), extents, batch)
    expect_tensors("to_core", feats=feats, coords=coords)
    if coords.ndim != 2 or coords.shape[1] - 1 not in _DIMENSIONS:
        raise GeometryError(f"coordinates have shape {list(coords.shape)}; expected [N, 1 + D], with one batch column.")
    dimension = coords.shape[1] - 1
    text = f"{dimension + 2} entries (batch, S1 .. S{dimension}, channels)"
    batch, *sizes, _ = shape_entries(shape, dimension + 2, text)
    return SparseData(feats, coords, (1,) * dimension, tuple(sizes), batch)


def _channels_last() -> bool:
    return profile.in_force() == "2.0"


def from_core(data: SparseData, like: Any = None) -> Voxels:
    """A `Voxels`; without a spatial shape the bounds of the data are taken, which must not be
    negative. Raises GeometryError for other than three axes, in 2.0 for other than two to four."""
    require_type("from_core", data, SparseData, "a SparseData, such as to_core gives")
    last = _channels_last()
    if data.dimension not in (_DIMENSIONS if last else (3,)):
        raise GeometryError(f"flex_gemm has {'two to four' if last else 'three'} axes, the data {data.dimension}.")
    extents, batch = data.spatial_shape, data.batch_size
    if extents is None or batch is None:
        ends = (data.coords.amax(0) + 1).tolist() if len(data.coords) else [0] * (1 + data.dimension)
        if len(data.coords) and int(data.coords.min()) < 0:
            raise GeometryError("flex_gemm has no negative coordinates; shift the data first.")
        extents = tuple(ends[1:]) if extents is None else extents
        batch = ends[0] if batch is None else batch
    return Voxels(data.feats, data.coords, _shape(batch, extents, data.feats.shape[1]))


def with_channels(shape: Sequence[int], channels: int) -> torch.Size:
    """The shape of a `Voxels` with other channels."""
    batch, *others = shape
    return _shape(batch, others[:-1] if _channels_last() else others[1:], channels)


def _shape(batch: int, sizes: Sequence[int], channels: int) -> torch.Size:
    return torch.Size((batch, *sizes, channels) if _channels_last() else (batch, channels, *sizes))
