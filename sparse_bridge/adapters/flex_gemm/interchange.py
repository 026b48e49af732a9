"""FlexGEMM's plain tensors to and from the form that all adapters share.

FlexGEMM has no tensor class: what travels is a tuple (features, coordinates, shape).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.geometry.sparse_data import SparseData, brief
from ...errors import GeometryError
from .geometry import check_coords, grid_shape


class Voxels(NamedTuple):
    """The first three arguments of FlexGEMM's functions: features [N, C], coordinates int32 [N, 4]
    (batch, x, y, z), shape (batch, C, S1, S2, S3)."""

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
    batch, _, extents = grid_shape(shape)
    return SparseData(feats, check_coords(coords, "to_core"), (1, 1, 1), extents, batch)


def from_core(data: SparseData, like: Any = None) -> Voxels:
    """A `Voxels`; without a spatial shape the bounds of the data are taken, which must not be
    negative. Raises GeometryError for other than three axes."""
    if data.dimension != 3:
        raise GeometryError(f"flex_gemm has three axes, the data {data.dimension}.")
    extents, batch = data.spatial_shape, data.batch_size
    if extents is None or batch is None:
        ends = (data.coords.amax(0) + 1).tolist() if len(data.coords) else [0] * 4
        if len(data.coords) and int(data.coords.min()) < 0:
            raise GeometryError("flex_gemm has no negative coordinates; shift the data first.")
        extents = tuple(ends[1:]) if extents is None else extents
        batch = ends[0] if batch is None else batch
    shape = torch.Size((batch, data.feats.shape[1], *extents))
    return Voxels(data.feats, data.coords, shape)
