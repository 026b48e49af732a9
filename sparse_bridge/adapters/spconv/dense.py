"""`SparseConvTensor.dense()`."""

from __future__ import annotations

from typing import Any

import torch

from ...core.conv.deferred import materialize
from ...core.geometry.boxes import Box
from ...core.maps import map_cache
from ...core.maps.rows import rows_of
from ...core.ops.dense import first_outside, to_dense
from ...errors import CoordinateError, ShapeError
from .tensors import box_of


class CoordinateRangeError(CoordinateError, IndexError):
    """A row that lies outside the grid it is to be written into."""


class FeatureRowsError(ShapeError, RuntimeError):
    """Features and indices of one tensor have different numbers of rows."""


def dense(x: Any, channels_first: bool = True) -> torch.Tensor:
    """[B, C, *shape] contiguous, or [B, *shape, C]; zeros where nothing is; differentiable.

    Of rows that share coordinates one stays. Negative indices count from the end, as in Python.
    Raises CoordinateRangeError for rows beyond the grid, FeatureRowsError.
    """
    if torch.compiler.is_compiling():
        from . import compiled

        return compiled.dense(x, channels_first)
    rows, box = rows_of(x.indices), box_of(x)
    if rows.device is None:  # what is padded was looked at
        _check_inside(x.indices, box)
    features = materialize(x._features)
    if features.shape[0] != x.indices.shape[0]:
        raise FeatureRowsError(
            f"dense() got {features.shape[0]} rows of features for {x.indices.shape[0]} of indices; both need N rows."
        )
    return to_dense(features, x.indices, box.size, channels_first=channels_first, rows=rows)


def _check_inside(indices: torch.Tensor, box: Box) -> None:
    """Whether coordinates lie inside is known where a layer computed or read them; others are read once."""
    store = map_cache.store_of(indices)
    cmap = store.find(box)
    if cmap is None or cmap.alive is not None:
        store.get(("inside", box), lambda: _look_inside(indices, box.size))


def _look_inside(indices: torch.Tensor, size: tuple[int, ...]) -> bool:
    wrong = first_outside(indices, size, negative=True)
    if wrong is not None:
        row, column, count = wrong
        name = "batch index" if column == 0 else f"axis {column - 1}"
        raise CoordinateRangeError(
            f"row {row} has {name} {int(indices[row, column])}, but the grid holds {size[column]} "
            f"({count} such entries); correct the indices or the grid first."
        )
    return True
