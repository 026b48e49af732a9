"""Correspondences between the coordinates of two tensors."""

from sparse_bridge.adapters.minkowski.manager import stride_pairs

__all__ = ["get_coords_map"]


def get_coords_map(x, y):
    """(rows of x, rows of y), int64: every row of x and the row of the coarser y that holds it."""
    keys = x.coordinate_map_key.key, y.coordinate_map_key.key
    return stride_pairs(x._manager._manager, *keys)
