"""Functional forms of the layers, and sums of sparse tensors."""

import torch
from cumm import tensorview as tv  # noqa: F401 - the name is upstream's
from spconv.debug_utils import spconv_save_debug_data as spconv_save_debug_data
from spconv.pytorch import ops as ops
from spconv.pytorch.constants import PYTORCH_VERSION as PYTORCH_VERSION
from spconv.pytorch.core import SparseConvTensor as SparseConvTensor
from spconv.pytorch.hash import HashTable as HashTable
from spconv.tools import CUDAKernelTimer as CUDAKernelTimer

from sparse_bridge.adapters.spconv import functional, pairs
from sparse_bridge.adapters.spconv.sums import sparse_add as sparse_add
from sparse_bridge.adapters.spconv.sums import sparse_add_hash_based as sparse_add_hash_based


class _Entry:
    """A differentiable function behind the `Function.apply` spelling."""

    @classmethod
    def apply(cls, *args):
        return cls.forward(*args)


class SparseConvFunction(_Entry):
    """Convolution from pair lists -> [num_activate_out, K]."""

    _inverse = False
    _subm = False

    @classmethod
    def forward(
        cls,
        features,
        filters,
        indice_pairs,
        indice_pair_num,
        num_activate_out,
        algo=None,
        timer=None,
        bias=None,
        act_alpha=0.0,
        act_beta=0.0,
        act_type=None,
    ):
        kmap = pairs.map_from_pairs(
            indice_pairs, indice_pair_num, features.shape[0], num_activate_out, cls._subm, cls._inverse
        )
        return functional.convolution(features, filters, kmap, bias, act_alpha, act_type)


class SparseInverseConvFunction(SparseConvFunction):
    """The pairs read backwards."""

    _inverse = True


class SubMConvFunction(SparseConvFunction):
    """Submanifold pairs."""

    _subm = True


class SparseImplicitGemmFunction(_Entry):
    """The same from tables; masks and their orders are accepted and not needed."""

    @staticmethod
    def forward(
        features,
        filters,
        pair_fwd,
        pair_bwd,
        pair_mask_fwd_splits,
        pair_mask_bwd_splits,
        mask_argsort_fwd_splits,
        mask_argsort_bwd_splits,
        num_activate_out,
        masks,
        is_train,
        is_subm,
        timer=None,
        fp32_accum=None,
        bias=None,
        act_alpha=0.0,
        act_beta=0.0,
        act_type=None,
    ):
        kmap = pairs.map_from_table(pair_fwd, features.shape[0], num_activate_out)
        return functional.convolution(features, filters, kmap, bias, act_alpha, act_type)


class SparseMaxPoolFunction(_Entry):
    """max(0, window) from pair lists."""

    @staticmethod
    def forward(features, indice_pairs, indice_pair_num, num_activate_out):
        kmap = pairs.map_from_pairs(indice_pairs, indice_pair_num, features.shape[0], num_activate_out)
        return functional.max_pool(features, kmap)


class SparseMaxPoolImplicitGemmFunction(_Entry):
    """max(0, window) from tables."""

    @staticmethod
    def forward(features, pair_fwd, pair_bwd, num_activate_out):
        kmap = pairs.map_from_table(pair_fwd, features.shape[0], num_activate_out)
        return functional.max_pool(features, kmap)


class SparseAvgPoolImplicitGemmFunction(_Entry):
    """Mean over the present inputs, from tables."""

    @staticmethod
    def forward(features, pair_fwd, pair_bwd, num_activate_out, calc_count=True):
        kmap = pairs.map_from_table(pair_fwd, features.shape[0], num_activate_out)
        return functional.avg_pool(features, kmap)


def identity_decorator(func):
    """`func` itself."""
    return func


indice_conv = SparseConvFunction.apply
indice_inverse_conv = SparseInverseConvFunction.apply
indice_subm_conv = SubMConvFunction.apply
implicit_gemm = SparseImplicitGemmFunction.apply
indice_maxpool = SparseMaxPoolFunction.apply
indice_maxpool_implicit_gemm = SparseMaxPoolImplicitGemmFunction.apply
indice_avgpool_implicit_gemm = SparseAvgPoolImplicitGemmFunction.apply

Function = torch.autograd.Function
