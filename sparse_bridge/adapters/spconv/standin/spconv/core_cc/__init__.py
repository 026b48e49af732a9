"""spconv's compiled extension by its module paths. What Python code calls works on our engine; the
rest is importable and refuses by name."""

from spconv.core_cc import csrc, cumm
from spconv.core_cc.csrc import hash, sparse, utils

from sparse_bridge.adapters.spconv.upstream.missing import MissingExtensionError

__all__ = ["csrc", "cumm"]

del hash, sparse, utils


def __getattr__(name):
    raise MissingExtensionError.of(__name__, name)
