"""The release of the profile in force."""

from sparse_bridge.adapters.torchsparse import profile as _profile


def __getattr__(name):
    if name == "__version__":
        return _profile.peek().version
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
