"""Multilinear interpolation between the cells of a coordinate map."""

from __future__ import annotations

import itertools

import torch

from ..maps.coordinate_map import CoordinateMap
from ..maps.lookup import find_rows
from .row_matrix import RowMatrix


def corners(position: torch.Tensor, spacing: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid points around positions and their multilinear weights.

    position: [M, D] float64, finite.  spacing: distance of grid points per axis.
    Returns: int64 [M, 2^D, D], multiples of the spacing, and float64 [M, 2^D].
    """
    step = torch.tensor(spacing, dtype=torch.float64, device=position.device)
    low = torch.floor(position / step)
    share = position / step - low
    choice = torch.tensor(list(itertools.product((0, 1), repeat=len(spacing))))
    choice = choice.to(position.device)
    points = (low.long().unsqueeze(1) + choice) * step.long()
    upper = choice.bool().unsqueeze(0)
    weights = torch.where(upper, share.unsqueeze(1), 1 - share.unsqueeze(1)).prod(2)
    return points, weights


def interpolation(
    cmap: CoordinateMap, batch: torch.Tensor, position: torch.Tensor, spacing: tuple[int, ...]
) -> RowMatrix:
    """The matrix from the rows of `cmap` to values at positions; absent grid points count as zero.

    batch: int64 [M].  position: float64 [M, D].  Weights are float64; pairs are listed by position,
    then by corner.
    """
    points, weights = corners(position, spacing)
    n_points, n_corners = weights.shape
    item = batch.view(-1, 1, 1).expand(-1, n_corners, 1)
    query = torch.cat([item, points], 2).flatten(0, 1)
    rows = find_rows(cmap, query)
    index = (rows >= 0).nonzero().squeeze(1)
    samples = torch.div(index, n_corners, rounding_mode="floor")
    in_rows = rows.index_select(0, index)
    return RowMatrix(samples, in_rows, weights.flatten().index_select(0, index), n_points, cmap.n_rows)
