"""Sparse convolution on plain tensors."""

from . import submanifold_conv, submanifold_conv3d
from .sparse_conv3d import SparseConv3dFunction, SparseConv3dNeighborCache
from .submanifold_conv3d import SubMConv3dFunction, SubMConv3dNeighborCache, sparse_submanifold_conv3d

# The function hides the submodule of its name, as upstream; the module stays importable.
from .sparse_conv3d import sparse_conv3d  # isort: skip

__all__ = [
    "Algorithm",
    "SerializationMode",
    "SparseConv3dFunction",
    "SparseConv3dNeighborCache",
    "SparseConv3dOutCoordAlgorithm",
    "SubMConv3dFunction",
    "SubMConv3dNeighborCache",
    "set_algorithm",
    "set_hashmap_ratio",
    "sparse_conv3d",
    "sparse_submanifold_conv3d",
    "submanifold_conv",
    "submanifold_conv3d",
]


class Algorithm:
    """Names of FlexGEMM's dataflows; here all of them give the same answers."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


class SerializationMode:
    """Row orders of generated coordinates."""

    BXYZ = 0
    Z_ORDER = 1
    HILBERT = 2


class SparseConv3dOutCoordAlgorithm:
    """Ways to find output coordinates; here both give the same rows."""

    HASHMAP = 0
    EXPAND_UNIQUE = 1


ALGORITHM = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK
HASHMAP_RATIO = 2.0
OUT_COORD_HASHMAP_RATIO = 1.1
OUT_COORD_ALGO = SparseConv3dOutCoordAlgorithm.HASHMAP
SERIALIZATION_MODE = SerializationMode.BXYZ


def set_algorithm(algorithm):
    """Any value is taken; a call with an unknown one raises."""
    global ALGORITHM
    ALGORITHM = algorithm


def set_hashmap_ratio(ratio):
    """Without meaning: the engine's tables are as large as they have to be."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio
