"""Points to voxels: the same answer, bit for bit, on every device.

Voxels are numbered by their first point; of each, the first points in input order are stored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from ._voxel_grid import PointDataTypeError, PointShapeError, VoxelGrid
from ._voxel_ops import NumpyOps, TorchOps, ops_for

Ops = type[NumpyOps] | type[TorchOps]


def _cells(xp: Ops, points: Any, grid: VoxelGrid) -> Any:
    """The row-major cell number of each of `points` [n, F]; `grid.volume` for those outside.

    int32 [n] where the grid allows it, else int64. The upper bound is outside; so are NaN and
    infinities. Computed in the dtype of the points, which decides for points on cell borders.
    """
    # Arrays, not Python scalars: by a scalar, CUDA multiplies with the reciprocal and so moves
    # points across cell borders.
    low = xp.numbers(grid.coors_range[: grid.ndim], points)
    size = xp.numbers(grid.vsize, points)
    columns = xp.columns(points, grid.ndim)
    wide = grid.volume >= 2**31
    key: Any = None
    inside: Any = None
    for axis, cells in enumerate(grid.grid_size):
        position = columns[grid.ndim - 1 - axis]
        position -= low[axis]
        position /= size[axis]
        xp.floor_(position)
        # Decided on floats, as converting NaN or huge values to integers is undefined.
        fits = position >= 0
        fits &= position < _at_least(cells, points)
        column = xp.integers(position, wide)
        if key is None:
            key, inside = column, fits
        else:
            key *= cells
            key += column
            inside &= fits
    xp.fill_where_(key, ~inside, grid.volume)
    return key


def _at_least(value: int, points: Any) -> float:
    """The smallest number of the points' dtype that is at least `value`."""
    if points.dtype in (torch.float64, np.float64):
        return float(value)
    rounded = np.float32(value)
    return float(rounded if rounded >= value else np.nextafter(rounded, np.float32(np.inf)))


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Points grouped by occupied cell.

    order: int64 [m], rows of the points inside, grouped by cell key and ascending inside a group.
    keys [U], starts and sizes (int64 [U]): the groups, in the order of their first points.
    """

    order: Any
    keys: Any
    starts: Any
    sizes: Any


def _group(xp: Ops, keys: Any, outside: int) -> _Groups:
    """Group the points with `keys` [n]; the key `outside`, the largest of all, means none."""
    ordered, order = xp.sort(keys, outside)
    total = int((keys != outside).sum())
    ordered, order = ordered[:total], order[:total]
    fresh = ordered == outside  # nowhere: a mask to write into
    fresh[:1] = True
    fresh[1:] = ordered[1:] != ordered[:-1]
    starts = xp.flat_nonzero(fresh)
    sizes = xp.filled(starts.shape[0], total, keys)
    sizes[:-1] = starts[1:]
    sizes -= starts
    # Each group's number, left at its first point; reading the points in order sorts the groups.
    owner = xp.filled(keys.shape[0], -1, keys)
    owner[xp.take(order, starts)] = xp.arange(starts.shape[0], keys)
    by_first = xp.take(owner, xp.flat_nonzero(owner >= 0))
    starts = xp.take(starts, by_first)
    return _Groups(order, xp.take(ordered, starts), starts, xp.take(sizes, by_first))


def _ids(xp: Ops, groups: _Groups, count: int, n_points: int) -> Any:
    """int64 [n_points]: the group of each point, -1 outside and from group `count` on."""
    total, n_groups = groups.order.shape[0], groups.starts.shape[0]
    number = xp.arange(n_groups, groups.order)
    number[count:] = -1
    # Groups lie in `order` by key, so back to the order of their starts.
    _, by_key = xp.sort(groups.starts, n_points)
    member = xp.repeat(xp.take(groups.sizes, by_key), total)
    ids = xp.filled(n_points, -1, groups.order)
    ids[groups.order] = xp.take(xp.take(number, by_key), member)
    return ids


class VoxelBuffers:
    """The output arrays of one voxelizer, reused by every call.

    voxels: float32 [max_num_voxels, P, F].  indices: int32 [max_num_voxels, nd] (z, y, x).
    num_per_voxel: int32 [max_num_voxels].
    """

    def __init__(
        self,
        grid: VoxelGrid,
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device,
    ) -> None:
        self.grid = grid
        sizes = int(max_num_voxels), int(max_num_points_per_voxel), int(num_point_features)
        if min(sizes) < 0:
            raise PointShapeError(
                f"max_num_voxels={sizes[0]}, max_num_points_per_voxel={sizes[1]} and "
                f"num_point_features={sizes[2]} must not be negative"
            )
        self.voxels = torch.zeros(sizes, device=device)
        self.indices = torch.zeros(sizes[0], grid.ndim, dtype=torch.int32, device=device)
        self.num_per_voxel = torch.zeros(sizes[0], dtype=torch.int32, device=device)

    @classmethod
    def around(cls, voxelizer: Any) -> VoxelBuffers:
        """The buffers that a voxelizer of spconv holds itself, a `PointToVoxel`."""
        grid = VoxelGrid(
            list(voxelizer.vsize), list(voxelizer.grid_size), list(voxelizer.grid_stride), list(voxelizer.coors_range)
        )
        return cls.over(grid, voxelizer.voxels, voxelizer.indices, voxelizer.num_per_voxel)

    @classmethod
    def over(
        cls, grid: VoxelGrid, voxels: torch.Tensor, indices: torch.Tensor, num_per_voxel: torch.Tensor
    ) -> VoxelBuffers:
        """Those of the caller's memory."""
        buffers = cls.__new__(cls)
        buffers.grid, buffers.voxels, buffers.indices = grid, voxels, indices
        buffers.num_per_voxel = num_per_voxel
        return buffers

    def check(self, points: torch.Tensor) -> None:
        """Raises PointShapeError or PointDataTypeError unless `points` can be voxelized."""
        n_voxels, n_slots, width = self.voxels.shape
        if points.ndim != 2 or points.shape[1] != width or width < self.grid.ndim:
            raise PointShapeError(
                f"points have shape {list(points.shape)}; expected [n, {width}] with the "
                f"{self.grid.ndim} coordinates in the first columns"
            )
        if points.dtype not in (torch.float32, torch.float64):
            raise PointDataTypeError(
                f"points are {points.dtype}; only float32 and float64 have an exact cell rule, "
                "so convert them before the call"
            )
        if n_voxels == 0 or n_slots == 0:
            raise PointShapeError(
                f"max_num_voxels={n_voxels} and max_num_points_per_voxel={n_slots} hold no point; both must be positive"
            )

    def fill(
        self, points: torch.Tensor, clear_voxels: bool, empty_mean: bool, with_ids: bool = False
    ) -> tuple[int, torch.Tensor | None]:
        """Voxelize `points` [n, F] into the buffers: (voxels M, int64 [n] voxel of each point).

        A point outside the grid, or whose cell came after the last voxel, has id -1. Slots that
        are not written keep their old content if `clear_voxels` is off.
        """
        self.check(points)
        xp = ops_for(points.device)
        array = xp.array(points)
        with np.errstate(all="ignore"):  # NaN and infinities are data here
            keys = _cells(xp, array, self.grid)
        groups = _group(xp, keys, self.grid.volume)
        count = min(groups.starts.shape[0], self.voxels.shape[0])
        if clear_voxels:
            xp.array(self.voxels)[...] = 0
        self._store_cells(xp, groups, count)
        self._store_points(xp, array, groups, count)
        if empty_mean:
            fill_with_mean(self.voxels[:count], self.num_per_voxel[:count])
        ids = _ids(xp, groups, count, points.shape[0]) if with_ids else None
        return count, None if ids is None else xp.tensor(ids)

    def copies(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies of the first `count` voxels, indices and counts."""
        return (self.voxels[:count].clone(), self.indices[:count].clone(), self.num_per_voxel[:count].clone())

    def _store_cells(self, xp: Ops, groups: _Groups, count: int) -> None:
        counts, indices = xp.array(self.num_per_voxel), xp.array(self.indices)
        counts[...] = 0
        counts[:count] = groups.sizes[:count].clip(max=self.voxels.shape[1])
        cells = xp.integers(groups.keys[:count], self.grid.volume >= 2**31)
        for axis, stride in enumerate(self.grid.grid_stride[:-1]):
            coordinate = cells // stride
            indices[:count, axis] = coordinate
            cells = cells - coordinate * stride
        indices[:count, -1] = cells

    def _store_points(self, xp: Ops, points: Any, groups: _Groups, count: int) -> None:
        """The stored points, one voxel after another: where each comes from and where it goes."""
        n_slots, width = self.voxels.shape[1:]
        used = xp.array(self.num_per_voxel)[:count]
        ends = used.cumsum(0)
        total = int(ends[-1]) if count else 0
        starts = ends - used
        voxel = xp.repeat(used, total)
        slot = xp.arange(total, points)
        slot -= xp.take(starts, voxel)
        rows = xp.take(groups.order, xp.take(groups.starts[:count], voxel) + slot)
        voxel *= n_slots
        voxel += slot
        xp.put_rows_(xp.array(self.voxels).reshape(-1, width), voxel, xp.take(points, rows))


def fill_with_mean(voxels: torch.Tensor, used: torch.Tensor) -> None:
    """Fill the free slots of voxels [M, P, F], of which so many [M] are used, with the mean of the
    used ones."""
    used = used.view(-1, 1, 1)
    free = torch.arange(voxels.shape[1], device=voxels.device).view(1, -1, 1) >= used
    # Stale slots may hold anything, NaN included, so they are replaced and not multiplied.
    mean = voxels.masked_fill(free, 0).sum(1, keepdim=True).div_(used)
    voxels.copy_(torch.where(free, mean, voxels))
