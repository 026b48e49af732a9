"""Hash tables as FlexGEMM's users make them."""

from sparse_bridge.adapters.flex_gemm.upstream.hash_table import init_hashmap

__all__ = ["init_hashmap"]
