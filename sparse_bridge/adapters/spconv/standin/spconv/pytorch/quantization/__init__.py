"""Quantisation to int8 by torch's graph mode: calibration after training, and training with fake
quantisation.

Activations have one scale per tensor and zero point 0, weights one scale per output channel. All of
it is computed in float: layers give the values that int8 would give. Kernels that compute in int8
are not here; what would need them raises UnsupportedError.
"""

from spconv.pytorch.quantization.backend_cfg import (
    get_spconv_backend_config,
    get_spconv_convert_custom_config,
    get_spconv_prepare_custom_config,
    prepare_spconv_torch_inference,
)
from spconv.pytorch.quantization.core import quantize_per_tensor
from spconv.pytorch.quantization.fake_q import (
    get_default_spconv_qconfig_mapping,
    get_default_spconv_trt_ptq_qconfig,
    get_default_spconv_trt_qat_qconfig,
)
from spconv.pytorch.quantization.graph import remove_conv_add_dq, transform_qdq
from spconv.pytorch.quantization.qmapping import get_spconv_fmod_to_qat_mapping, get_spconv_qat_to_static_mapping

__all__ = [
    "get_default_spconv_qconfig_mapping",
    "get_default_spconv_trt_ptq_qconfig",
    "get_default_spconv_trt_qat_qconfig",
    "get_spconv_backend_config",
    "get_spconv_convert_custom_config",
    "get_spconv_fmod_to_qat_mapping",
    "get_spconv_prepare_custom_config",
    "get_spconv_qat_to_static_mapping",
    "prepare_spconv_torch_inference",
    "quantize_per_tensor",
    "remove_conv_add_dq",
    "transform_qdq",
]
