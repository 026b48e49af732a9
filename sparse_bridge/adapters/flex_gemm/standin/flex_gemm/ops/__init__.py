"""Operations on sparse voxels."""

from . import grid_sample, serialize, spconv, utils

__all__ = ["grid_sample", "serialize", "spconv", "utils"]
