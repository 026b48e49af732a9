"""Layers."""

from sparse_bridge.adapters.flex_gemm.v2.modules import NAMES as _NAMES

from . import pool, sparse_conv, submanifold_conv, upsample

globals().update(_NAMES)

__all__ = ["pool", "sparse_conv", "submanifold_conv", "upsample", *_NAMES]
