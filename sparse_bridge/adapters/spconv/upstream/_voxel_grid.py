"""The geometry of a voxel grid.

Voxel sizes, ranges and points come as x, y, z; grids and voxel indices run z, y, x.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ....errors import DataTypeError, GeometryError, ShapeError


class GridError(GeometryError, RuntimeError, TypeError):
    """Voxel sizes and range do not describe a grid.

    RuntimeError and TypeError too: `PointToVoxel` and the low-level classes differ in the kind.
    """


class PointShapeError(ShapeError, RuntimeError):
    """The point array is not [n, num_point_features], or the buffers have no capacity."""


class PointDataTypeError(DataTypeError, RuntimeError):
    """The points are neither float32 nor float64."""


@dataclasses.dataclass(frozen=True)
class VoxelGrid:
    """The geometry of a voxel grid; every list runs z, y, x.

    vsize [nd], coors_range [2 nd] (all lower bounds, then all upper): rounded to float32.
    grid_size, grid_stride [nd]: cells per axis, and their row-major strides.
    """

    vsize: list[float]
    grid_size: list[int]
    grid_stride: list[int]
    coors_range: list[float]

    @property
    def ndim(self) -> int:
        return len(self.vsize)

    @property
    def volume(self) -> int:
        return math.prod(self.grid_size)

    @classmethod
    def from_xyz(
        cls, vsize_xyz: Sequence[float], coors_range_xyz: Sequence[float], ndim: int | None = None
    ) -> VoxelGrid:
        """The grid of voxel sizes [nd] and bounds [2 nd] given as x, y, z.

        Raises GridError for other lengths, for nd outside 1..4 and where an axis has no cell.
        """
        count = len(vsize_xyz)
        if not 1 <= count <= 4 or count != (ndim or count) or len(coors_range_xyz) != 2 * count:
            expected = f"{ndim} voxel sizes and {2 * ndim}" if ndim else "1 to 4 voxel sizes and 2 x"
            raise GridError(
                f"got {count} voxel sizes and {len(coors_range_xyz)} range bounds; "
                f"expected {expected} bounds, lower ones first"
            )
        # In float32 throughout, as upstream: one cell more would change every shape after it.
        size = np.asarray([float(v) for v in vsize_xyz], dtype=np.float32)[::-1]
        bounds = np.asarray([float(v) for v in coors_range_xyz], dtype=np.float32)
        low, high = bounds[:count][::-1], bounds[count:][::-1]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            cells = (high - low) / size
        if not (np.isfinite(cells).all() and (cells >= 0.5).all()):
            raise GridError(
                f"vsize_xyz={list(vsize_xyz)} and coors_range_xyz={list(coors_range_xyz)} leave "
                "an axis without cells; sizes must be positive and upper bounds above lower ones"
            )
        # Half away from zero, unlike Python's round; the sum is exact in float64.
        shape = [math.floor(float(c) + 0.5) for c in cells]
        stride = [math.prod(shape[axis + 1 :]) for axis in range(count)]
        if math.prod(shape) >= 2**62:
            raise GridError(f"a grid of {shape} cells cannot be indexed; use larger voxels")
        return cls(size.tolist(), shape, stride, low.tolist() + high.tolist())
