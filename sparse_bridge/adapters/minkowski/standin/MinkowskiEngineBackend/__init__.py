"""The package of MinkowskiEngine's compiled part, answered by sparse_bridge; in 0.4 it was that
part."""

from MinkowskiEngineBackend._C import *  # noqa: F403
from MinkowskiEngineBackend._C import MemoryManagerBackend as _Backend

from sparse_bridge.adapters.minkowski import profile as _profile

CUDA, PYTORCH = _Backend.CUDA, _Backend.PYTORCH  # constants of 0.4


def __getattr__(name):
    if name == "__version__":
        return _profile.version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
