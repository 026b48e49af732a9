"""Dense grids."""

from sparse_bridge.adapters.torchsparse.operations.dense import to_dense

__all__ = ["to_dense"]
