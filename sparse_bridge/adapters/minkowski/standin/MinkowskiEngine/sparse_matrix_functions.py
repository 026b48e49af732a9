"""Sparse times dense matrices, direct maxima, and the base of all autograd functions."""

import torch

from sparse_bridge.adapters.minkowski.upstream.lists import listed_matrix, listed_mean
from sparse_bridge.core.ops.max_rows import list_max
from sparse_bridge.errors import UnsupportedError

__all__ = [
    "ComposedFunction",
    "MinkowskiDirectMaxPoolingFunction",
    "MinkowskiSPMMAverageFunction",
    "MinkowskiSPMMFunction",
    "spmm",
    "spmm_average",
]


class ComposedFunction(torch.autograd.Function):
    """An upstream autograd function that is composed of differentiable operations here.

    `apply` works on the class and on instances, which upstream's modules keep.
    """

    def __init__(self):
        """torch warns about instances; these are harmless."""

    def __init_subclass__(cls, **options):
        """A subclass with a forward or backward of its own is applied as torch does it."""
        super().__init_subclass__(**options)
        if not vars(cls).keys().isdisjoint(("forward", "backward")) and "apply" not in vars(cls):
            cls.apply = classmethod(torch.autograd.Function.apply.__func__)

    @staticmethod
    def forward(*args):
        raise UnsupportedError(
            "functions of MinkowskiEngine are composed of differentiable operations here and have no "
            "forward and backward; override apply, or both of them without super()."
        )

    @staticmethod
    def compute(*args):
        raise NotImplementedError

    @classmethod
    def apply(cls, *args, **kwargs):
        return cls.compute(*args, **kwargs)


def spmm(rows, cols, vals, size, mat, is_sorted=False, cuda_spmm_alg=1):
    """out[rows] += vals * mat[cols]: [size[0], C], differentiable in mat, deterministic.

    Raises: ArgumentValueError, FeatureShapeError.
    """
    return listed_matrix(rows, cols, vals, size, mat).multiply(mat)


def spmm_average(rows, cols, size, mat, cuda_spmm_alg=1):
    """Means of the rows of `mat` that each row lists: (out [size[0], C], COO int64 [2, P], vals
    [P]), with rows ascending in COO and vals the weight of each entry. Rows without entries are 0.

    Raises: ArgumentValueError, FeatureShapeError.
    """
    out, counts = listed_mean(rows, cols, size, mat)
    order = torch.sort(rows.long().to(mat.device), stable=True).indices
    coo = torch.stack([part.long().to(mat.device)[order] for part in (rows, cols)])
    return out, coo, counts[coo[0]].to(mat.dtype).reciprocal()


class MinkowskiSPMMFunction(ComposedFunction):
    """apply(rows, cols, vals, size, mat, cuda_spmm_alg=1); gradient with respect to mat."""

    @staticmethod
    def compute(rows, cols, vals, size, mat, cuda_spmm_alg=1):
        return listed_matrix(rows, cols, vals, size, mat).multiply(mat)


class MinkowskiSPMMAverageFunction(ComposedFunction):
    """apply(rows, cols, size, mat, cuda_spmm_alg=1): rows of the product divided by their count."""

    @staticmethod
    def compute(rows, cols, size, mat, cuda_spmm_alg=1):
        return listed_mean(rows, cols, size, mat)[0]


class MinkowskiDirectMaxPoolingFunction(ComposedFunction):
    """apply(in_map, out_map, features, out_nrows, is_sorted=False): maxima of the listed rows."""

    @staticmethod
    def compute(in_map, out_map, features, out_nrows, is_sorted=False):
        return list_max(features, in_map.long(), out_map.long(), out_nrows)
