"""Map building and raw products on tensors."""

import numpy as np
import torch
from cumm import tensorview as tv
from cumm.conv.bases import KRSC, NHWC, ConvOpType
from spconv import constants
from spconv.algo import CONV, CONV_CPP, GEMM, GEMM_CPP
from spconv.constants import (
    ALL_WEIGHT_IS_KRSC,
    FILTER_HWIO,
    SPCONV_ALLOW_TF32,
    SPCONV_CPP_GEMM,
    SPCONV_CPP_INDICE_PAIRS,
    SPCONV_CPP_INDICE_PAIRS_IGEMM,
    SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE,
    SPCONV_DO_SORT,
    SPCONV_USE_DIRECT_TABLE,
    AllocKeys,
)
from spconv.core import AlgoHint, ConvAlgo
from spconv.core_cc.csrc.sparse.all import SpconvOps
from spconv.core_cc.csrc.sparse.alloc import ExternalAllocator
from spconv.core_cc.csrc.sparse.convops.spops import ConvGemmOps
from spconv.core_cc.csrc.sparse.inference import InferenceOps
from spconv.cppconstants import CPU_ONLY_BUILD
from spconv.pytorch.core import ThrustSortAllocator
from spconv.pytorch.cppcore import TorchAllocator, TorchSpconvMatmul, get_arch, get_current_stream, torch_tensor_to_tv
from spconv.tools import CUDAKernelTimer, nullcontext

from sparse_bridge.adapters.spconv import functional, geometry, pairs
from sparse_bridge.adapters.spconv.upstream.boxes import nms
from sparse_bridge.errors import UnsupportedError

# What upstream's module holds besides its functions; of switches, what they were at its import.
__all__ = [
    "ALL_WEIGHT_IS_KRSC",
    "CONV",
    "CONV_CPP",
    "CPU_ONLY_BUILD",
    "DEBUG",
    "DEBUG_INT64_HASH_K",
    "FILTER_HWIO",
    "GEMM",
    "GEMM_CPP",
    "INT32_MAX",
    "KRSC",
    "NHWC",
    "SPCONV_ALLOW_TF32",
    "SPCONV_CPP_GEMM",
    "SPCONV_CPP_INDICE_PAIRS",
    "SPCONV_CPP_INDICE_PAIRS_IGEMM",
    "SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE",
    "SPCONV_DO_SORT",
    "SPCONV_USE_DIRECT_TABLE",
    "AlgoHint",
    "AllocKeys",
    "CUDAKernelTimer",
    "ConvAlgo",
    "ConvGemmOps",
    "ConvOpType",
    "ExternalAllocator",
    "InferenceOps",
    "SpconvOps",
    "ThrustSortAllocator",
    "TorchAllocator",
    "TorchSpconvMatmul",
    "constants",
    "fused_indice_conv",
    "get_arch",
    "get_conv_output_size",
    "get_current_stream",
    "get_deconv_output_size",
    "get_indice_pairs",
    "get_indice_pairs_implicit_gemm",
    "global_pool_rearrange",
    "implicit_gemm",
    "implicit_gemm_backward",
    "indice_avgpool_implicit_gemm",
    "indice_avgpool_implicit_gemm_backward",
    "indice_conv",
    "indice_conv_backward",
    "indice_maxpool",
    "indice_maxpool_backward",
    "indice_maxpool_implicit_gemm",
    "indice_maxpool_implicit_gemm_backward",
    "maximum_value_int_",
    "nms",
    "np",
    "nullcontext",
    "torch",
    "torch_tensor_to_tv",
    "tv",
]

DEBUG = False
DEBUG_INT64_HASH_K = False
INT32_MAX = (1 << 31) - 1


def get_conv_output_size(input_size, kernel_size, stride, padding, dilation):
    """Per axis floor((I + 2p - d(k - 1) - 1) / s) + 1; k == -1 collapses an axis to 1."""
    rule = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    geometry.check_axes(input_size=input_size, **rule)
    return geometry.conv_output_size(input_size, **rule)


def get_deconv_output_size(input_size, kernel_size, stride, padding, dilation, output_padding):
    """Per axis (I - 1)s - 2p + k + output_padding, whatever the dilation."""
    rule = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    geometry.check_axes(input_size=input_size, **rule, output_padding=output_padding)
    return geometry.deconv_output_size(input_size, **rule, output_padding=output_padding)


def get_indice_pairs(
    indices,
    batch_size,
    spatial_shape,
    algo,
    ksize,
    stride,
    padding,
    dilation,
    out_padding,
    subm=False,
    transpose=False,
    num_out_act_bound=-1,
):
    """(out_inds int32 [M, nd + 1], pairs int32 [2, V, N], num_per_loc int32 [V])."""
    _no_bound(num_out_act_bound)
    rule = ksize, stride, padding, dilation, out_padding
    out, kmap = _build(indices, batch_size, spatial_shape, rule, subm, transpose, algo)
    return (out, *pairs.indice_pairs(kmap, indices.shape[0], subm))


def get_indice_pairs_implicit_gemm(
    indices,
    batch_size,
    spatial_shape,
    algo,
    ksize,
    stride,
    padding,
    dilation,
    out_padding,
    subm=False,
    transpose=False,
    is_train=True,
    alloc=None,
    timer=None,
    num_out_act_bound=-1,
    direct_table=None,
    do_sort=None,
):
    """The kernel map as tables.

    direct_table: whether new rows may come in any order; None: `SPCONV_USE_DIRECT_TABLE`.
    do_sort: whether rows are ordered by their masks; None: `SPCONV_DO_SORT`.

    Returns out_inds, num_per_loc, pair_fwd [V, M], pair_bwd [V, N], lists of the masks of both and
    of their orders, and the masks of the splits.
    """
    _no_bound(num_out_act_bound)
    rule = ksize, stride, padding, dilation, out_padding
    options = subm, transpose, algo, direct_table
    out, kmap = _build(indices, batch_size, spatial_shape, rule, *options)
    fwd, bwd = pairs.tables_of(kmap)
    counts = (fwd >= 0).sum(1, dtype=torch.int32)
    mask_fwd, order_fwd = pairs.masks_and_order(fwd, do_sort)
    mask_bwd, order_bwd = pairs.masks_and_order(bwd, do_sort)
    masks = [np.array([(1 << min(32, fwd.shape[0])) - 1], dtype=np.uint32)]
    return out, counts, fwd, bwd, [mask_fwd], [mask_bwd], [order_fwd], [order_bwd], masks


_RULE = "ksize", "stride", "padding", "dilation", "out_padding"


def _build(indices, batch_size, spatial_shape, rule, subm, transpose, algo, direct_table=None):
    geometry.check_axes(spatial_shape=spatial_shape, **dict(zip(_RULE, rule, strict=True)))
    layer = geometry.LayerGeometry(*map(tuple, rule), subm, transpose)
    return functional.build_map(indices, batch_size, spatial_shape, layer, algo, direct_table)


def _no_bound(bound):
    if bound > 0:
        raise UnsupportedError("num_out_act_bound limits the output of spconv's TensorRT build; leave it at -1.")


def indice_conv(
    features,
    filters,
    indice_pairs,
    indice_pair_num,
    num_activate_out,
    inverse=False,
    subm=False,
    algo=ConvAlgo.Native,
    timer=None,
    bias=None,
    act_alpha=0.0,
    act_beta=0.0,
    act_type=tv.gemm.Activation.None_,
):
    """features [N, C], filters KRSC -> [M, K]."""
    kmap = pairs.map_from_pairs(indice_pairs, indice_pair_num, features.shape[0], num_activate_out, subm, inverse)
    return functional.convolution(features, filters, kmap, bias, act_alpha, act_type)


def indice_conv_backward(
    features,
    filters,
    out_bp,
    indice_pairs,
    indice_pair_num,
    inverse=False,
    subm=False,
    algo=ConvAlgo.Native,
    timer=None,
):
    """(gradient of features, gradient of filters)."""
    kmap = pairs.map_from_pairs(indice_pairs, indice_pair_num, features.shape[0], out_bp.shape[0], subm, inverse)
    return functional.conv_backward(features, filters, kmap, out_bp)


def implicit_gemm(
    features,
    filters,
    pair_fwd,
    pair_mask_fwd_splits,
    mask_argsort_fwd_splits,
    num_activate_out,
    masks,
    is_train,
    is_subm,
    timer=None,
    fp32_accum=None,
    bias=None,
    act_alpha=0.0,
    act_beta=0.0,
    act_type=tv.gemm.Activation.None_,
    output_scale=1.0,
    scale=None,
    output_add=None,
    output_add_scale=0.0,
    output_dtype=None,
):
    """([M, K], mask_out, mask_width)."""
    if scale is not None or output_add is not None:
        raise UnsupportedError("quantisation scales are not supported; int8 inference is not bridged.")
    kmap = pairs.map_from_table(pair_fwd, features.shape[0], num_activate_out)
    out = functional.convolution(features, filters, kmap, bias, act_alpha, act_type)
    return (out if output_dtype is None else out.to(output_dtype), torch.empty(0, dtype=torch.int32), -1)


def implicit_gemm_backward(
    features,
    filters,
    out_bp,
    pair_fwd,
    pair_bwd,
    pair_mask_fwd_splits,
    pair_mask_bwd_splits,
    mask_argsort_fwd_splits,
    mask_argsort_bwd_splits,
    mask_output_fwd,
    masks,
    mask_width,
    is_subm,
    timer=None,
    fp32_accum=None,
):
    """(gradient of features, gradient of filters)."""
    kmap = pairs.map_from_table(pair_fwd, features.shape[0], out_bp.shape[0])
    return functional.conv_backward(features, filters, kmap, out_bp)


def indice_maxpool(features, indice_pairs, indice_pair_num, num_activate_out):
    kmap = pairs.map_from_pairs(indice_pairs, indice_pair_num, features.shape[0], num_activate_out)
    return functional.max_pool(features, kmap)


def indice_maxpool_backward(features, out_features, out_bp, indice_pairs, indice_pair_num):
    with torch.enable_grad():
        leaf = features.detach().requires_grad_()
        out = indice_maxpool(leaf, indice_pairs, indice_pair_num, out_bp.shape[0])
        return torch.autograd.grad(out, leaf, out_bp)[0]


def indice_maxpool_implicit_gemm(features, indice_pairs, num_activate_out):
    return functional.max_pool(features, pairs.map_from_table(indice_pairs, features.shape[0], num_activate_out))


def indice_maxpool_implicit_gemm_backward(features, out_features, out_bp, indice_pairs):
    """indice_pairs [V, N]: window of every input row."""
    return functional.max_pool_backward(features, out_features, out_bp, indice_pairs)


def indice_avgpool_implicit_gemm(features, indice_pairs, num_activate_out, calc_count):
    """([M, C], present inputs int32 [M], empty without calc_count)."""
    kmap = pairs.map_from_table(indice_pairs, features.shape[0], num_activate_out)
    counts = pairs.counts_of(indice_pairs) if calc_count else torch.empty(0, dtype=torch.int32)
    return functional.avg_pool(features, kmap), counts


def indice_avgpool_implicit_gemm_backward(out_bp, indice_pairs, count_out):
    """indice_pairs [V, N]; every input takes 1 / count of its windows' gradients."""
    return functional.avg_pool_backward(out_bp, indice_pairs, count_out)


def maximum_value_int_(ten, value):
    """ten = max(ten, value), in place."""
    return ten.clamp_(min=value)


def global_pool_rearrange(coords, batch_size):
    return pairs.global_pool_rearrange(coords, batch_size)


def fused_indice_conv(features, filters, bias, indice_pairs, indice_pair_num, num_activate_out, inverse, subm):
    raise UnsupportedError("fused_indice_conv does not exist in spconv 2.x either; use indice_conv.")
