"""The stand-in of any framework."""

from __future__ import annotations

import contextlib

import sparse_bridge
from tests.adapters.spconv import apis as spconv_apis


@contextlib.contextmanager
def standin(name):
    """The stand-in of a framework: (module of its layers, module of its tensor)."""
    if name == "spconv":
        with spconv_apis.standin() as module:
            yield module
        return
    with sparse_bridge.enable(name, mode="standin"):
        if name == "torchsparse":
            import torchsparse as module
        else:
            import MinkowskiEngine as module
        yield module
