"""int8 is not supported."""

from spconv.pytorch.quantization import refuse_class


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return refuse_class(name)
