"""Names that 2.0 keeps for code of 1.x."""

from sparse_bridge.adapters.flex_gemm.errors import other_generation as _other_generation
from sparse_bridge.adapters.flex_gemm.v2.functions import deprecated as _deprecated
from sparse_bridge.adapters.flex_gemm.v2.functions import sparse_submanifold_conv3d

from . import sparse_conv, sparse_conv_transpose, submanifold_conv

__all__ = [
    "Algorithm",
    "set_algorithm",
    "set_hashmap_ratio",
    "sparse_conv",
    "sparse_conv_transpose",
    "sparse_submanifold_conv3d",
    "submanifold_conv",
]


class Algorithm:
    """Names of FlexGEMM's dataflows; here all of them give the same answers."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


ALGORITHM = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK
HASHMAP_RATIO = 2.0


def set_algorithm(algorithm):
    """Any value is taken; a call with an unknown one raises."""
    global ALGORITHM
    _deprecated("set_algorithm", "pass algorithm= to the call")
    ALGORITHM = algorithm


def set_hashmap_ratio(ratio):
    """Without meaning: the engine's tables are as large as they have to be."""
    global HASHMAP_RATIO
    _deprecated("set_hashmap_ratio", "it has no effect")
    HASHMAP_RATIO = ratio


def __getattr__(name):
    if name in ("SparseConv3dFunction", "SubMConv3dFunction", "sparse_conv3d"):
        raise _other_generation(f"{__name__}.{name}", "1")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
