"""Which class stands for which in the steps of quantisation."""

from spconv.pytorch.conv import DEFAULT_SPARSE_CONV_TYPES
from spconv.pytorch.quantization import intrinsic, quantized
from spconv.pytorch.quantization.intrinsic import qat
from spconv.pytorch.quantization.intrinsic import quantized as fused

SPCONV_QAT_MODULE_MAPPINGS = {
    intrinsic.SpconvBnNd: qat.SparseConvBn,
    intrinsic.SpconvBnReLUNd: qat.SparseConvBnReLU,
    intrinsic.SpconvBnAddReLUNd: qat.SparseConvBnAddReLU,
}
STATIC_SPCONV_QUANT_MODULE_MAPPINGS = {
    **dict.fromkeys(DEFAULT_SPARSE_CONV_TYPES, quantized.SparseConv),
    intrinsic.SpconvReLUNd: fused.SparseConvReLU,
    intrinsic.SpconvAddReLUNd: fused.SparseConvAddReLU,
    qat.SparseConvBn: quantized.SparseConv,
    qat.SparseConvBnReLU: fused.SparseConvReLU,
    qat.SparseConvBnAddReLU: fused.SparseConvAddReLU,
}


def get_spconv_fmod_to_qat_mapping():
    """{fused layer: layer that trains with fake quantisation}"""
    return dict(SPCONV_QAT_MODULE_MAPPINGS)


def get_spconv_qat_to_static_mapping():
    """{layer: the layer on int8 values}"""
    return dict(STATIC_SPCONV_QUANT_MODULE_MAPPINGS)
