"""Functions of several tensors."""

from sparse_bridge.adapters.torchsparse.operations.joins import cat, generative_add
from sparse_bridge.adapters.torchsparse.operations.scatter import broadcast, scatter_sum

__all__ = ["broadcast", "cat", "generative_add", "scatter_sum"]
