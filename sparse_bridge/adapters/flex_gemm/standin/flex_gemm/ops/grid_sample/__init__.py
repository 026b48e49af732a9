"""Values of sparse voxels at points."""

from . import grid_sample, grid_sample_torch
from .grid_sample import GridSample3dFunction, grid_sample_3d
from .grid_sample_torch import grid_sample_3d_torch

__all__ = [
    "GridSample3dFunction",
    "grid_sample",
    "grid_sample_3d",
    "grid_sample_3d_torch",
    "grid_sample_torch",
    "set_hashmap_ratio",
]

HASHMAP_RATIO = 2.0


def set_hashmap_ratio(ratio):
    """Without meaning: the engine's tables are as large as they have to be."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio
