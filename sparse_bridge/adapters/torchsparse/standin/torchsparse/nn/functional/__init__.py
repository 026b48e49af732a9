"""Functions of layers."""

from . import build_kmap as build_kmap  # modules of releases before 2.1
from . import conv as _conv_package
from . import downsample as downsample
from . import hash
from .activation import leaky_relu, relu, silu
from .conv import (
    ConvMode,
    Dataflow,
    build_kernel_map,
    conv3d,
    conv_config,
    conv_mode,
    convert_transposed_out_in_map,
    get_conv_mode,
    get_default_conv_config,
    get_downsample_mode,
    get_global_conv_config,
    get_kmap_mode,
    kmap,
    set_conv_mode,
    set_downsample_mode,
    set_global_conv_config,
    set_kmap_mode,
    spdownsample,
    spupsample_generative,
    transpose_kernel_map,
    utils,
)
from .count import spcount
from .crop import spcrop
from .devoxelize import calc_ti_weights, spdevoxelize
from .hash import sphash
from .pooling import global_avg_pool, global_max_pool
from .query import sphashquery
from .voxelize import spvoxelize

# In the original too, the name means the innermost module.
conv = _conv_package.conv

__all__ = [
    "ConvMode",
    "Dataflow",
    "build_kernel_map",
    "calc_ti_weights",
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
    "global_avg_pool",
    "global_max_pool",
    "hash",
    "kmap",
    "leaky_relu",
    "relu",
    "set_conv_mode",
    "set_downsample_mode",
    "set_global_conv_config",
    "set_kmap_mode",
    "silu",
    "spcount",
    "spcrop",
    "spdevoxelize",
    "spdownsample",
    "sphash",
    "sphashquery",
    "spupsample_generative",
    "spvoxelize",
    "transpose_kernel_map",
    "utils",
]
