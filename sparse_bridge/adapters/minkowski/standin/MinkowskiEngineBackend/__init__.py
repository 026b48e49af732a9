"""The package of MinkowskiEngine's compiled part, answered by sparse_bridge; in 0.4 it was that
part."""

from MinkowskiEngineBackend._C import *  # noqa: F403

from sparse_bridge.adapters.minkowski import profile as _profile


def __getattr__(name):
    if name == "__version__":
        return _profile.version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
