"""Matrices that callers give as lists of entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....core.arguments import expect_tensors
from ....core.ops.row_matrix import RowMatrix
from ..errors import ArgumentValueError, FeatureShapeError


def listed_matrix(
    rows: torch.Tensor, cols: torch.Tensor, vals: torch.Tensor | None, size: Sequence[int], mat: torch.Tensor
) -> RowMatrix:
    """The matrix [size] of the entries (rows, cols): vals, 1 without them; `mat` [size[1], C] is
    what it will be multiplied with.

    Raises: ArgumentValueError, FeatureShapeError.
    """
    expect_tensors("spmm", rows=rows, cols=cols, mat=mat)
    if mat.ndim != 2 or rows.shape != cols.shape or rows.ndim != 1:
        raise FeatureShapeError(
            f"rows {list(rows.shape)}, cols {list(cols.shape)} and mat {list(mat.shape)}; expected [P], [P] and [M, C]."
        )
    if not mat.is_floating_point():
        raise ArgumentValueError(f"mat is {mat.dtype}; expected floating point.")
    if vals is not None and (vals.dtype != mat.dtype or vals.shape != rows.shape):
        raise ArgumentValueError(f"vals are {vals.dtype} {list(vals.shape)}; expected {mat.dtype} {list(rows.shape)}.")
    if mat.shape[0] != int(size[1]):
        raise FeatureShapeError(f"mat has {mat.shape[0]} rows for a matrix of size {list(size)}.")
    rows, cols = rows.long().to(mat.device), cols.long().to(mat.device)
    if len(rows):
        low = min(int(rows.min()), int(cols.min()))
        if low < 0 or int(rows.max()) >= size[0] or int(cols.max()) >= size[1]:
            raise FeatureShapeError(f"rows or cols leave the matrix of size {list(size)}.")
    weights = None if vals is None else vals.detach()
    return RowMatrix(rows, cols, weights, int(size[0]), int(size[1]))


def listed_mean(
    rows: torch.Tensor, cols: torch.Tensor, size: Sequence[int], mat: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the mean of the rows of `mat` that each row lists, 0 for none; how many, at least 1)."""
    matrix = listed_matrix(rows, cols, None, size, mat)
    counts = matrix.counts().clamp(min=1)
    return matrix.multiply(mat) / counts.unsqueeze(1).to(mat.dtype), counts
