"""Output sites of strided layers."""

from sparse_bridge.adapters.torchsparse import profile
from sparse_bridge.adapters.torchsparse.signatures import coords_arguments
from sparse_bridge.adapters.torchsparse.upstream import kmap

__all__ = ["spdownsample"]


def spdownsample(*args, **kwargs):
    """Up to 2.0: (coords, stride=2, kernel_size=2, tensor_stride=1).  2.1: (coords, stride=2,
    kernel_size=2, padding=0, spatial_range=None, downsample_mode="spconv"). int32 [M, 4],
    ascending.
    """
    old, new = ("tensor_stride",), ("padding", "spatial_range", "downsample_mode")
    names = ("stride", "kernel_size", *(new if profile.current().divides else old))
    arguments = coords_arguments("spdownsample", names, args, kwargs)
    return kmap.downsample(**{"stride": 2, "kernel_size": 2, **arguments})
