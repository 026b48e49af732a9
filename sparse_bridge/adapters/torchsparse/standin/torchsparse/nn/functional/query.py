"""Finding keys."""

from sparse_bridge.adapters.torchsparse.points import sphashquery

__all__ = ["sphashquery"]
