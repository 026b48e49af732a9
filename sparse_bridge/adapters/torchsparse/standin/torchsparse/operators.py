"""Functions of several tensors."""

from sparse_bridge.adapters.torchsparse.operations.joins import cat, generative_add

__all__ = ["cat", "generative_add"]
