"""int8 inference: importable, not supported. Every call says so."""

from sparse_bridge.errors import UnsupportedError


def refuse(name):
    """A function that raises UnsupportedError."""

    def refused(*args, **kwargs):
        raise UnsupportedError(f"{name}: int8 not supported; run the model in fp16, bf16 or fp32.")

    refused.__name__ = refused.__qualname__ = name
    return refused


def refuse_class(name):
    """A class whose constructor raises UnsupportedError."""
    return type(name, (), {"__init__": refuse(name), "__doc__": "int8 is not supported."})


get_spconv_backend_config = refuse("get_spconv_backend_config")
get_spconv_prepare_custom_config = refuse("get_spconv_prepare_custom_config")
get_spconv_convert_custom_config = refuse("get_spconv_convert_custom_config")
prepare_spconv_torch_inference = refuse("prepare_spconv_torch_inference")
get_default_spconv_trt_ptq_qconfig = refuse("get_default_spconv_trt_ptq_qconfig")
get_default_spconv_trt_qat_qconfig = refuse("get_default_spconv_trt_qat_qconfig")
get_default_spconv_qconfig_mapping = refuse("get_default_spconv_qconfig_mapping")
get_spconv_fmod_to_qat_mapping = refuse("get_spconv_fmod_to_qat_mapping")
get_spconv_qat_to_static_mapping = refuse("get_spconv_qat_to_static_mapping")
quantize_per_tensor = refuse("quantize_per_tensor")
remove_conv_add_dq = refuse("remove_conv_add_dq")
transform_qdq = refuse("transform_qdq")
