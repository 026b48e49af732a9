"""What convolutions, norms, sums and activations are fused to."""

from spconv import pytorch as spconv  # noqa: F401 - the name is upstream's
from spconv.pytorch.conv import DEFAULT_SPARSE_CONV_TYPES as DEFAULT_SPARSE_CONV_TYPES
from spconv.pytorch.quantization import intrinsic
from spconv.pytorch.quantization.intrinsic.qat.modules import SparseConvBn as SparseConvBn
from spconv.pytorch.quantization.intrinsic.qat.modules import SparseConvBnAddReLU as SparseConvBnAddReLU
from spconv.pytorch.quantization.intrinsic.qat.modules import SparseConvBnReLU as SparseConvBnReLU
from spconv.pytorch.quantization.utils import fuse_spconv_bn_eval


def fuse_conv_bn(is_qat, conv, bn, is_add_fuse=False):
    """In training both as one module; otherwise a convolution with the norm folded in."""
    return intrinsic.SpconvBnNd(conv, bn) if is_qat else fuse_spconv_bn_eval(conv, bn)


def fuse_conv_bn_relu(is_qat, conv, bn, relu, is_add_fuse=False):
    """is_add_fuse: the module takes a second tensor, added before the activation."""
    if is_qat:
        fused = intrinsic.SpconvBnAddReLUNd if is_add_fuse else intrinsic.SpconvBnReLUNd
        return fused(conv, bn, relu)
    return _conv_relu(fuse_spconv_bn_eval(conv, bn), relu, is_add_fuse)


def fuse_conv_bn_add_relu(is_qat, relu, add_pattern):
    """add_pattern: (sum, (norm, convolution), the other summand)"""
    _, (bn, conv), _ = add_pattern
    return fuse_conv_bn_relu(is_qat, conv, bn, relu, True)


def fuse_conv_relu(is_qat, conv, relu):
    return _conv_relu(conv, relu, False)


def fuse_conv_add_relu(is_qat, relu, add_pattern):
    """add_pattern: (sum, convolution, the other summand)"""
    return _conv_relu(add_pattern[1], relu, True)


def _conv_relu(conv, relu, is_add_fuse):
    fused = intrinsic.SpconvAddReLUNd if is_add_fuse else intrinsic.SpconvReLUNd
    return fused(conv, relu)
