"""Sparse times dense matrices, direct maxima, and the base of all autograd functions."""

import torch

from sparse_bridge.adapters.minkowski.errors import ArgumentValueError, FeatureShapeError
from sparse_bridge.core.ops.max_rows import list_max
from sparse_bridge.core.ops.row_matrix import RowMatrix

__all__ = [
    "ComposedFunction", "MinkowskiDirectMaxPoolingFunction", "MinkowskiSPMMAverageFunction",
    "MinkowskiSPMMFunction", "spmm",
]  # fmt: skip


class ComposedFunction(torch.autograd.Function):
    """An upstream autograd function that is composed of differentiable operations here.

    `apply` works on the class and on instances, which upstream's modules keep.
    """

    def __init__(self):
        """torch warns about instances; these are harmless."""

    @staticmethod
    def compute(*args):
        raise NotImplementedError

    @classmethod
    def apply(cls, *args, **kwargs):
        return cls.compute(*args, **kwargs)


def _matrix(rows, cols, vals, size, mat):
    if mat.ndim != 2 or rows.shape != cols.shape or rows.ndim != 1:
        raise FeatureShapeError(
            f"rows {list(rows.shape)}, cols {list(cols.shape)} and mat {list(mat.shape)}; "
            "expected [P], [P] and [M, C]."
        )
    if not mat.is_floating_point():
        raise ArgumentValueError(f"mat is {mat.dtype}; expected floating point.")
    if vals is not None and (vals.dtype != mat.dtype or vals.shape != rows.shape):
        raise ArgumentValueError(
            f"vals are {vals.dtype} {list(vals.shape)}; expected {mat.dtype} {list(rows.shape)}."
        )
    if mat.shape[0] != int(size[1]):
        raise FeatureShapeError(f"mat has {mat.shape[0]} rows for a matrix of size {list(size)}.")
    rows, cols = rows.long().to(mat.device), cols.long().to(mat.device)
    if len(rows):
        low = min(int(rows.min()), int(cols.min()))
        if low < 0 or int(rows.max()) >= size[0] or int(cols.max()) >= size[1]:
            raise FeatureShapeError(f"rows or cols leave the matrix of size {list(size)}.")
    weights = None if vals is None else vals.detach()
    return RowMatrix(rows, cols, weights, int(size[0]), int(size[1]))


def spmm(rows, cols, vals, size, mat, is_sorted=False, cuda_spmm_alg=1):
    """out[rows] += vals * mat[cols]: [size[0], C], differentiable in mat, deterministic.

    Raises: ArgumentValueError, FeatureShapeError.
    """
    return _matrix(rows, cols, vals, size, mat).multiply(mat)


class MinkowskiSPMMFunction(ComposedFunction):
    """apply(rows, cols, vals, size, mat, cuda_spmm_alg=1); gradient with respect to mat."""

    @staticmethod
    def compute(rows, cols, vals, size, mat, cuda_spmm_alg=1):
        return _matrix(rows, cols, vals, size, mat).multiply(mat)


class MinkowskiSPMMAverageFunction(ComposedFunction):
    """apply(rows, cols, size, mat, cuda_spmm_alg=1): rows of the product divided by their count."""

    @staticmethod
    def compute(rows, cols, size, mat, cuda_spmm_alg=1):
        matrix = _matrix(rows, cols, None, size, mat)
        return matrix.multiply(mat) / matrix.counts().clamp(min=1).unsqueeze(1).to(mat.dtype)


class MinkowskiDirectMaxPoolingFunction(ComposedFunction):
    """apply(in_map, out_map, features, out_nrows, is_sorted=False): maxima of the listed rows."""

    @staticmethod
    def compute(in_map, out_map, features, out_nrows, is_sorted=False):
        return list_max(features, in_map.long(), out_map.long(), out_nrows)
