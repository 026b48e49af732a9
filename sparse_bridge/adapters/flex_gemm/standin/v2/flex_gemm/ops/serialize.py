"""A module of FlexGEMM 1.x."""

from sparse_bridge.adapters.flex_gemm.errors import other_generation

raise other_generation(__name__, "1", module=True)
