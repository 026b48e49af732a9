"""Layers."""

from sparse_bridge.adapters.flex_gemm.v2.modules import NAMES as _NAMES

globals().update(_NAMES)

__all__ = list(_NAMES)
