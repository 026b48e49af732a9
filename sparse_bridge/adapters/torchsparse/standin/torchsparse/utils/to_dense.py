"""Dense grids."""

from sparse_bridge.adapters.torchsparse.joins import to_dense

__all__ = ["to_dense"]
