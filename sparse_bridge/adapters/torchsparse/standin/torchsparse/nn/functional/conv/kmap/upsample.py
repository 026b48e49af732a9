"""Sites of generative layers."""

from sparse_bridge.adapters.torchsparse.signatures import coords_arguments
from sparse_bridge.adapters.torchsparse.upstream import kmap

__all__ = ["spupsample_generative"]


_NAMES = ("stride", "kernel_size", "padding", "spatial_range")


def spupsample_generative(*args, **kwargs):
    """(coords, stride=2, kernel_size=2, padding=0, spatial_range=None): every site around the
    coordinates times stride, int32 [M, 4], ascending."""
    arguments = coords_arguments("spupsample_generative", _NAMES, args, kwargs)
    default = {"stride": 2, "kernel_size": 2, "padding": 0, "spatial_range": None}
    return kmap.generate(**{**default, **arguments})
