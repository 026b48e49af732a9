"""What torch's graph mode needs to know of sparse layers."""

import operator

import torch
from spconv.pytorch import ToDense
from spconv.pytorch.constants import PYTORCH_VERSION as PYTORCH_VERSION
from spconv.pytorch.conv import DEFAULT_SPARSE_CONV_TYPES, SparseConvolution
from spconv.pytorch.identity import Identity
from spconv.pytorch.modules import (
    PrintCurrentTime,
    PrintTensorMeta,
    SparseBatchNorm,
    SparseIdentity,
    SparseReLU,
    SparseSyncBatchNorm,
)
from spconv.pytorch.pool import ALL_POOL_LAYERS
from spconv.pytorch.quantization import intrinsic
from spconv.pytorch.quantization.fuse_mapping import (
    fuse_conv_add_relu,
    fuse_conv_bn,
    fuse_conv_bn_add_relu,
    fuse_conv_bn_relu,
    fuse_conv_relu,
)
from spconv.pytorch.quantization.intrinsic import qat
from spconv.pytorch.quantization.intrinsic.quantized import (
    LinearPerChannelWeightReLU,
    SparseConvAddReLU,
    SparseConvReLU,
)
from spconv.pytorch.quantization.qmapping import get_spconv_qat_to_static_mapping
from spconv.pytorch.quantization.quantized import LinearPerChannelWeight, SparseConv
from spconv.pytorch.quantization.quantized.reference import SpConv
from torch import nn
from torch.ao.nn.intrinsic import LinearReLU
from torch.ao.nn.quantized import reference as torch_reference
from torch.ao.quantization.backend_config import (
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    get_tensorrt_backend_config,
)
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.ao.quantization.utils import MatchAllNode

weighted_op_qint8_dtype_config = DTypeConfig(
    input_dtype=torch.qint8, output_dtype=torch.qint8, weight_dtype=torch.qint8, bias_dtype=torch.float
)
conv_dtype_configs = [weighted_op_qint8_dtype_config]
non_weighted_op_qint8_dtype_config = DTypeConfig(input_dtype=torch.qint8, output_dtype=torch.qint8)

_CONVOLUTIONS = [*sorted(DEFAULT_SPARSE_CONV_TYPES, key=lambda c: c.__name__), SparseConvolution]
_NORMS = [nn.BatchNorm1d, SparseBatchNorm, SparseSyncBatchNorm]
_RELUS = [nn.ReLU, nn.functional.relu, SparseReLU]
_FUSED = {
    intrinsic.SpconvReLUNd: qat.SparseConvReLU,
    intrinsic.SpconvAddReLUNd: qat.SparseConvAddReLU,
    intrinsic.SpconvBnNd: qat.SparseConvBn,
    intrinsic.SpconvBnReLUNd: qat.SparseConvBnReLU,
    intrinsic.SpconvBnAddReLUNd: qat.SparseConvBnAddReLU,
}


def _weighted(pattern=None):
    return (
        BackendPatternConfig(pattern)
        .set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
        .set_dtype_configs(conv_dtype_configs)
    )


def _fusion(pattern, fuser, fused):
    return _weighted(pattern).set_fuser_method(fuser).set_fused_module(fused)


def _residual(add, root, fuser, fused):
    """relu(add(root, anything)), written from the end; root: a convolution, or (norm, it)."""
    nested = isinstance(root, tuple)
    return (
        _weighted()
        ._set_pattern_complex_format((SparseReLU, (add, root, MatchAllNode)))
        .set_fuser_method(fuser)
        .set_fused_module(fused)
        ._set_root_node_getter(_root_of_norm if nested else _root_of_sum)
        ._set_extra_inputs_getter(_other_summand)
    )


def _root_of_sum(pattern):
    _, (_, conv, _) = pattern
    return conv


def _root_of_norm(pattern):
    _, (_, (_, conv), _) = pattern
    return conv


def _other_summand(pattern):
    _, (_, _, other) = pattern
    return [other]


def _of_convolution(conv, norms):
    yield (_weighted(conv).set_root_module(conv).set_qat_module(qat.SparseConv).set_reference_quantized_module(SpConv))
    for relu in _RELUS:
        yield _fusion((conv, relu), fuse_conv_relu, intrinsic.SpconvReLUNd)
    for add in (torch.add, operator.add):
        yield _residual(add, conv, fuse_conv_add_relu, intrinsic.SpconvAddReLUNd)
    for norm in norms:
        yield _fusion((conv, norm), fuse_conv_bn, intrinsic.SpconvBnNd)
        for relu in _RELUS:
            yield _fusion((conv, norm, relu), fuse_conv_bn_relu, intrinsic.SpconvBnReLUNd)
        for add in (torch.add, operator.add):
            fused = intrinsic.SpconvBnAddReLUNd
            yield _residual(add, (norm, conv), fuse_conv_bn_add_relu, fused)


def _of_fused():
    for fused, trained in _FUSED.items():
        yield _weighted(fused).set_qat_module(trained)
        for module in (fused, trained):
            config = _weighted(module).set_root_module(SparseConvolution)
            config.set_reference_quantized_module(SpConv)
            yield config.set_qat_module(trained) if module is fused else config
    trained = _weighted(qat.SparseConv).set_root_module(SparseConvolution)
    yield trained.set_reference_quantized_module(SpConv)


def _others():
    """Layers whose values are their inputs' share the inputs' scale."""
    maximum = {pool for pool in ALL_POOL_LAYERS if "Max" in pool.__name__}
    for pattern in (*maximum, ToDense, SparseIdentity, Identity, SparseReLU, "dense"):
        yield (
            BackendPatternConfig(pattern)
            .set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
            .set_dtype_configs([non_weighted_op_qint8_dtype_config])
        )


def get_spconv_backend_config(additional_bns=None):
    """torch's configuration for TensorRT and sparse layers. additional_bns: more norms."""
    config = get_tensorrt_backend_config()
    norms = [*_NORMS, *(additional_bns or [])]
    patterns = [pattern for conv in _CONVOLUTIONS for pattern in _of_convolution(conv, norms)]
    return config.set_backend_pattern_configs([*patterns, *_of_fused(), *_others()])


def get_spconv_prepare_custom_config(additional_bns=None):
    """Which modules the trace shows as one node. additional_bns: more classes of norms."""
    leaves = [
        *_CONVOLUTIONS,
        *ALL_POOL_LAYERS,
        SparseReLU,
        SparseBatchNorm,
        SparseSyncBatchNorm,
        PrintTensorMeta,
        PrintCurrentTime,
        *(additional_bns or []),
    ]
    return PrepareCustomConfig().set_non_traceable_module_classes(leaves)


# What torch's convert_fx makes of reference layers, where a program adds these to its maps.
SPCONV_STATIC_LOWER_MODULE_MAP = {SpConv: SparseConv}
SPCONV_STATIC_LOWER_FUSED_MODULE_MAP = {
    intrinsic.SpconvReLUNd: (SpConv, SparseConvReLU),
    intrinsic.SpconvAddReLUNd: (SpConv, SparseConvAddReLU),
}


def get_spconv_convert_custom_config():
    """The configuration of torch's convert_fx: empty."""
    return ConvertCustomConfig()


def prepare_spconv_torch_inference(with_linear):
    """To be called before torch's convert_fx.

    with_linear: linear layers convert to `LinearPerChannelWeight`, for torch's own takes no signed
    activations. This holds for the process, as upstream.
    """
    if not isinstance(with_linear, bool):
        raise TypeError(f"with_linear is {with_linear!r}; expected True or False.")
    if with_linear:
        from torch.ao.quantization.fx import _lower_to_native_backend as lowering

        linear = torch_reference.Linear
        lowering.STATIC_LOWER_MODULE_MAP[linear] = LinearPerChannelWeight
        lowering.STATIC_LOWER_FUSED_MODULE_MAP[LinearReLU] = linear, LinearPerChannelWeightReLU


__all__ = [
    "SPCONV_STATIC_LOWER_FUSED_MODULE_MAP",
    "SPCONV_STATIC_LOWER_MODULE_MAP",
    "conv_dtype_configs",
    "get_spconv_backend_config",
    "get_spconv_convert_custom_config",
    "get_spconv_prepare_custom_config",
    "get_spconv_qat_to_static_mapping",
    "non_weighted_op_qint8_dtype_config",
    "prepare_spconv_torch_inference",
    "weighted_op_qint8_dtype_config",
]
