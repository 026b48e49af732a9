"""Layers of FlexGEMM 2.0."""

from sparse_bridge.adapters.flex_gemm.errors import other_generation

raise other_generation(__name__, "2.0", module=True)
