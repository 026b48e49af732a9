"""Strided pools."""

from sparse_bridge.adapters.flex_gemm.v2.module_names import of as _of

_NAMES = _of(__name__)
globals().update(_NAMES)

__all__ = list(_NAMES)
