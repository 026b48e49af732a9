"""Quantisation: points that share a voxel, found as data loaders do and merged."""

from __future__ import annotations

import torch

from ....core.arguments import expect_tensors
from ....core.maps.lookup import distinct_rows
from ....core.ops.max_rows import list_max
from ....core.ops.row_matrix import RowMatrix
from ..errors import ArgumentValueError, CoordinateTypeError, FeatureTypeError
from .enums import SparseTensorQuantizationMode as Mode

_REDUCTIONS = (Mode.UNWEIGHTED_AVERAGE, Mode.UNWEIGHTED_SUM, Mode.MAX_POOL)


def reduce_points(
    features: torch.Tensor, mode: Mode, first: torch.Tensor | None, inverse: torch.Tensor, n_voxels: int
) -> torch.Tensor:
    """Features [N, C] of points -> [n_voxels, C], always a new tensor.

    first: int64 [n_voxels], the first point of every voxel; None when every point has its own, in
    order.  inverse: int64 [N], the voxel of every point.
    Raises: FeatureTypeError, ArgumentValueError (a mode that does not merge).
    """
    if first is None:
        return features.clone()
    if mode is Mode.RANDOM_SUBSAMPLE:
        return features.index_select(0, first)
    if mode not in _REDUCTIONS:
        raise ArgumentValueError(
            f"{features.shape[0]} points lie in {n_voxels} voxels, and {mode.name} does not merge "
            "them; choose RANDOM_SUBSAMPLE, UNWEIGHTED_AVERAGE, UNWEIGHTED_SUM or MAX_POOL "
            "(TensorField.splat() spreads points)."
        )
    if not features.is_floating_point():
        raise FeatureTypeError(f"{mode.name} of {features.dtype} features; only RANDOM_SUBSAMPLE takes them.")
    points = torch.arange(inverse.shape[0], device=inverse.device)
    if mode is Mode.MAX_POOL:
        return list_max(features, points, inverse, n_voxels)
    matrix = RowMatrix(inverse, points, None, n_voxels, inverse.shape[0])
    if mode is Mode.UNWEIGHTED_SUM:
        return matrix.multiply(features)
    half = features.dtype in (torch.float16, torch.bfloat16)
    total = matrix.multiply(features.float() if half else features)
    return (total / matrix.counts().unsqueeze(1).to(total.dtype)).to(features.dtype)


def reduce_onto(features: torch.Tensor, mode: Mode, rows: torch.Tensor, n_voxels: int) -> torch.Tensor:
    """`reduce_points` onto voxels that exist: rows int64 [N]; a voxel without points gives 0."""
    points = torch.arange(rows.shape[0], device=rows.device)
    if mode is Mode.RANDOM_SUBSAMPLE:
        first = torch.full((n_voxels,), rows.shape[0], dtype=torch.int64, device=rows.device)
        first.scatter_reduce_(0, rows, points, "amin")
        padded = torch.cat([features, features.new_zeros((1, features.shape[1]))])
        return padded.index_select(0, first)
    if mode is Mode.MAX_POOL:
        return list_max(features, points, rows, n_voxels)
    matrix = RowMatrix(rows, points, None, n_voxels, rows.shape[0])
    total = matrix.multiply(features)
    if mode is Mode.UNWEIGHTED_SUM:
        return total
    return total / matrix.counts().clamp(min=1).unsqueeze(1).to(total.dtype)


def vote_labels(labels: torch.Tensor, first: torch.Tensor, inverse: torch.Tensor, ignore_label: int) -> torch.Tensor:
    """Label of every voxel: that of its points if they agree, otherwise `ignore_label`.

    labels: integers [N].  first, inverse: as in `reduce_points`.
    """
    voted = labels.index_select(0, first)
    wrong = inverse[labels != voted.index_select(0, inverse)]
    return voted.index_fill(0, wrong, ignore_label)


def quantize_points(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first row of every distinct coordinate, the distinct coordinate of every row), int64.

    coords: int32 [N, D]; distinct ones are numbered in the order of their first row.
    Raises: CoordinateTypeError.
    """
    expect_tensors("unique_coordinate_map", coordinates=coords)
    if coords.dtype != torch.int32 or coords.ndim != 2 or coords.shape[1] < 1:
        raise CoordinateTypeError(
            f"coordinates are {coords.dtype} of shape {list(coords.shape)}; expected int32 [N, D]."
        )
    return distinct_rows(coords)


def quantize_labels(
    coords: torch.Tensor, labels: torch.Tensor, ignore_label: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_points` and the label of every distinct coordinate, `ignore_label` on conflict.

    labels: int32, N of them in any shape ([N, 1] is common), on the CPU; voted ones are [U].
    Raises: CoordinateTypeError.
    """
    if labels.dtype != torch.int32 or labels.numel() != coords.shape[0]:
        raise CoordinateTypeError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}; expected int32 [{coords.shape[0]}]."
        )
    first, inverse = quantize_points(coords)
    return first, inverse, vote_labels(labels.reshape(-1), first, inverse, ignore_label)
