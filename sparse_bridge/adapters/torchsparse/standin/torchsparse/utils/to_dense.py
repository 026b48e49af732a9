"""Dense grids."""

from sparse_bridge.adapters.torchsparse.dense import to_dense

__all__ = ["to_dense"]
