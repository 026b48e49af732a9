"""torchsparse, answered by sparse_bridge: the names of all releases, the rules of the profile."""

from sparse_bridge.adapters.torchsparse import profile as _profile

from . import backend, backends, nn, operators, tensor, utils, version
from .operators import cat, generative_add
from .tensor import PointTensor, SparseTensor
from .utils.tune import tune

__all__ = [
    "PointTensor",
    "SparseTensor",
    "backend",
    "backends",
    "cat",
    "generative_add",
    "nn",
    "operators",
    "tensor",
    "tune",
    "utils",
    "version",
]


def __getattr__(name):
    if name == "__version__":
        return _profile.peek().version
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
