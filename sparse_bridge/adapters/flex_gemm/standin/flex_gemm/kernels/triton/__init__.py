"""Names of FlexGEMM's Triton kernels."""

from . import grid_sample, spconv, utils
from .grid_sample import indice_weighed_sum_bwd_input, indice_weighed_sum_fwd
from .spconv import *  # noqa: F403
from .spconv import config

__all__ = [
    "config",
    "grid_sample",
    "indice_weighed_sum_bwd_input",
    "indice_weighed_sum_fwd",
    "spconv",
    "utils",
    *spconv.__all__,
]
