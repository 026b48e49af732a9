"""spconv's compiled extension: importable, but its functions have no counterpart here."""

from sparse_bridge.errors import UnsupportedError


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnsupportedError(
        f"spconv.core_cc.{name} is part of spconv's compiled extension; use the Python API instead."
    )
