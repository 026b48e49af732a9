"""Functions of the features alone."""

from sparse_bridge.adapters.torchsparse.tensors import fapply

__all__ = ["fapply"]
