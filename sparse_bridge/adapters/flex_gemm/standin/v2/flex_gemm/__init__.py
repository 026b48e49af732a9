"""FlexGEMM 2.0, answered by sparse_bridge."""

from sparse_bridge.adapters.flex_gemm.v2.functions import NAMES as _NAMES

from . import config, nn, ops, utils

globals().update(_NAMES)

__all__ = ["config", "nn", "ops", "utils", *_NAMES]
