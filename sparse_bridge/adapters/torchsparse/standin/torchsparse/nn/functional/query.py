"""Finding keys."""

from sparse_bridge.adapters.torchsparse.upstream.points import sphashquery

__all__ = ["sphashquery"]
