"""Cropping."""

from torchsparse.tensor import SparseTensor

from sparse_bridge.adapters.torchsparse.operations import joins

__all__ = ["spcrop"]


def spcrop(input, coords_min=None, coords_max=None):
    """Rows inside the limits, with caches of their own and no spatial_range."""
    feats, coords = joins.crop(input, coords_min, coords_max)
    return SparseTensor(feats, coords, input.stride)
