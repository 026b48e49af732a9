"""What the original compiles: here the hash tables that projects use directly."""

from sparse_bridge.adapters.torchsparse.upstream.hash_table import CoordinateTable

__all__ = ["GPUHashTable", "GPUHashTable32"]


class GPUHashTable(CoordinateTable):
    """A table of a given capacity, or over (keys, vals) tensors; neither limits what it holds.

    The tensors stay as they are: two tables over the same ones share nothing.
    """

    def __init__(self, keys, vals=None):
        super().__init__()
        self.keys, self.vals = (None, None) if vals is None else (keys, vals)


class GPUHashTable32(GPUHashTable):
    """The twin with 32-bit keys; the same here."""
