"""Weighted sums of rows."""

from sparse_bridge.adapters.flex_gemm.upstream.extension import indice_weighed_sum_bwd_input, indice_weighed_sum_fwd

from . import config

__all__ = ["config", "indice_weighed_sum_bwd_input", "indice_weighed_sum_fwd"]
