"""Sites of generative layers."""

from sparse_bridge.adapters.torchsparse.upstream import kmap

__all__ = ["spupsample_generative"]


def spupsample_generative(_coords, stride=2, kernel_size=2, padding=0, spatial_range=None):
    """Every site around the coordinates times stride, int32 [M, 4], ascending."""
    return kmap.generate(_coords, stride, kernel_size, padding, spatial_range)
