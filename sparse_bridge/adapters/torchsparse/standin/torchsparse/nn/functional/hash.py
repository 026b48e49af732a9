"""Keys of coordinates."""

from sparse_bridge.adapters.torchsparse.upstream.points import sphash

__all__ = ["sphash"]
