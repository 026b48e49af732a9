"""Keys of coordinates."""

from sparse_bridge.adapters.torchsparse.points import sphash

__all__ = ["sphash"]
