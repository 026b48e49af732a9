"""What FlexGEMM's kernels ask of the device."""

from sparse_bridge.adapters.flex_gemm.upstream.autotuner import get_autotune_config, get_num_sm

__all__ = ["get_autotune_config", "get_num_sm"]
