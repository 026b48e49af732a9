"""Convolution: the function, its configuration and its kernel maps."""

from . import conv, conv_config, conv_mode, hash, kmap, utils
from .conv import conv3d
from .conv_config import Dataflow, get_default_conv_config, get_global_conv_config, set_global_conv_config
from .conv_mode import (
    ConvMode,
    get_conv_mode,
    get_downsample_mode,
    get_kmap_mode,
    set_conv_mode,
    set_downsample_mode,
    set_kmap_mode,
)
from .kmap import (
    build_kernel_map,
    convert_transposed_out_in_map,
    spdownsample,
    spupsample_generative,
    transpose_kernel_map,
)

__all__ = [
    "ConvMode",
    "Dataflow",
    "build_kernel_map",
    "conv",
    "conv3d",
    "conv_config",
    "conv_mode",
    "convert_transposed_out_in_map",
    "get_conv_mode",
    "get_default_conv_config",
    "get_downsample_mode",
    "get_global_conv_config",
    "get_kmap_mode",
    "hash",
    "kmap",
    "set_conv_mode",
    "set_downsample_mode",
    "set_global_conv_config",
    "set_kmap_mode",
    "spdownsample",
    "spupsample_generative",
    "transpose_kernel_map",
    "utils",
]
