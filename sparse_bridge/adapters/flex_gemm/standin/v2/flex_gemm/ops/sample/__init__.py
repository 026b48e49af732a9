"""Values at points, and changes of the resolution."""

from sparse_bridge.adapters.flex_gemm.v2.module_names import of as _of

from . import grid_sample, pixel_shuffle, pixel_unshuffle, upsample

_NAMES = _of(__name__)
globals().update(_NAMES)

__all__ = ["grid_sample", "pixel_shuffle", "pixel_unshuffle", "upsample", *_NAMES]
