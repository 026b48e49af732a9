"""Pools. Functions hide the modules of their names, which are imported first therefore."""

from sparse_bridge.adapters.flex_gemm.v2.module_names import of as _of

from . import sparse_pool, submanifold_pool  # noqa: F401

_NAMES = _of(__name__)
globals().update(_NAMES)

__all__ = list(_NAMES)
