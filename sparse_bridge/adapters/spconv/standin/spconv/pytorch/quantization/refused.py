"""Layers that need int8 kernels."""

from sparse_bridge.errors import UnsupportedError


def refused_layer(module, name):
    """A class that can be named in mappings, and refuses to be made."""

    def refuse(*args, **kwargs):
        raise UnsupportedError(
            f"{name} computes in int8, for which there are no kernels here. torch's convert_fx "
            "leaves reference layers in its place, which give its values in float."
        )

    body = {
        "__module__": module, "__init__": refuse, "from_float": staticmethod(refuse),
        "from_reference": staticmethod(refuse), "__doc__": "Needs int8 kernels: refuses.",
    }  # fmt: skip
    return type(name, (), body)
