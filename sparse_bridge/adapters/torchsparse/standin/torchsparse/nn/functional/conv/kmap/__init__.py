"""Kernel maps and output sites."""

from . import build_kmap, downsample, upsample
from .build_kmap import build_kernel_map, convert_transposed_out_in_map, transpose_kernel_map
from .downsample import spdownsample
from .upsample import spupsample_generative

__all__ = [
    "build_kernel_map",
    "build_kmap",
    "convert_transposed_out_in_map",
    "downsample",
    "spdownsample",
    "spupsample_generative",
    "transpose_kernel_map",
    "upsample",
]
