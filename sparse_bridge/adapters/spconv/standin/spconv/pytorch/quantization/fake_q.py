"""Observers of int8 training, which is not supported: any class name is found and refuses."""

import functools

from spconv.pytorch.quantization import refuse_class

_observer = functools.cache(refuse_class)


def __getattr__(name):
    if not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _observer(name)
