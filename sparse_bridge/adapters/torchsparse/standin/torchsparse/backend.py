"""What the original compiles: here what projects use of it."""

from sparse_bridge.adapters.torchsparse.upstream.hash_table import CoordinateTable
from sparse_bridge.adapters.torchsparse.upstream.points import spcount as count_cuda
from sparse_bridge.errors import UnsupportedError

__all__ = ["GPUHashTable", "GPUHashTable32", "build_kernel_map_subm_hashmap", "count_cuda"]


class GPUHashTable(CoordinateTable):
    """A table of a given capacity, or over (keys, vals) tensors; neither limits what it holds.

    The tensors stay as they are: two tables over the same ones share nothing.
    """

    def __init__(self, keys, vals=None):
        super().__init__()
        self.keys, self.vals = (None, None) if vals is None else (keys, vals)


class GPUHashTable32(GPUHashTable):
    """The twin with 32-bit keys; the same here."""


def build_kernel_map_subm_hashmap(*args):
    """Only there to be found, by programs that ask whether torchsparse has GPU code.

    Raises: UnsupportedError.
    """
    raise UnsupportedError(
        "torchsparse.backend.build_kernel_map_subm_hashmap fills tables of the original's kernels; "
        "nn.functional.build_kernel_map makes kernel maps here."
    )
