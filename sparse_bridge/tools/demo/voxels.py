"""From a scan to the input of the networks: crop, voxelise, average the points of a voxel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from ...errors import GeometryError, SettingError
from .points import PointCloud, require_crop
from .scene import street_scan

_MULTIPLE = 16  # the U-Net halves the grid four times
_LOWEST = 32  # layers in z: the encoder's strides need 25
_POINTS_PER_VOXEL = 10
_VOXEL = 0.05  # metres, of `street_voxels`
_MOST_CELLS = 1e30  # in an axis, so that they can be counted
_SMALLEST = 1e-9  # metres; numbers of smaller cells are no floats any more
_BEV_CHANNELS, _BEV_LIMIT = 128, 2 << 30  # channels and bytes of the dense bird's-eye view


@dataclasses.dataclass(frozen=True)
class VoxelGrid:
    """A voxelised scan.

    Attributes:
        features: [V, 4] float32, mean x, y, z (metres) and intensity of the points of a voxel.
        indices: [V, 4] int32, batch, z, y, x.
        shape: cells in z, y, x; at least as many as the crop has.
        origin: x, y, z of the corner of cell 0, metres.
        voxel_size: edge of a voxel, metres.
        points_inside: points of the scan within the crop.
    """

    features: torch.Tensor
    indices: torch.Tensor
    shape: tuple[int, int, int]
    origin: tuple[float, float, float]
    voxel_size: float
    points_inside: int

    def centers(self) -> np.ndarray:
        """Voxel centres, [V, 3] float64, x, y, z in metres."""
        cells = self.indices[:, [3, 2, 1]].cpu().numpy()
        return (cells + 0.5) * self.voxel_size + np.asarray(self.origin)


def crop_of(cloud: PointCloud, voxel_size: float) -> tuple[float, ...]:
    """A crop around the scan: x, y, z lowest, then x, y, z highest, in metres.

    A few stray echoes far off would blow the grid up. Where the outermost 0.2 % of the points
    (0.5 % in z) stretch the extent of the others by more than a quarter, they fall outside.
    """
    xyz = cloud.points[:, :3].astype(np.float64)
    tail = np.array([0.2, 0.2, 0.5])
    low = np.array([np.percentile(xyz[:, axis], tail[axis]) for axis in range(3)])
    high = np.array([np.percentile(xyz[:, axis], 100 - tail[axis]) for axis in range(3)])
    reach = 0.25 * (high - low)
    low = np.where(low - xyz.min(0) > reach, low, xyz.min(0))
    high = np.where(xyz.max(0) - high > reach, high, xyz.max(0))
    low = np.floor(low / voxel_size) * voxel_size
    cells = np.maximum(np.ceil((high - low) / voxel_size + 1e-6), 1)
    return (*map(float, low), *map(float, low + cells * voxel_size))


def grid_shape(crop: Sequence[float], voxel_size: float) -> tuple[int, int, int]:
    """Cells in z, y, x of the crop, rounded up to what the networks' strides need."""
    require_crop(crop)
    edges = [round(min((crop[i + 3] - crop[i]) / voxel_size, _MOST_CELLS)) for i in (2, 1, 0)]
    z, y, x = (-(-max(edge, 1) // _MULTIPLE) * _MULTIPLE for edge in edges)
    z = max(z, _LOWEST)
    dense = z // _MULTIPLE * (y // 8) * (x // 8) * _BEV_CHANNELS * 4
    if dense > _BEV_LIMIT:
        grid = " x ".join(_readable(edge, ",d") for edge in (z, y, x))
        raise GeometryError(
            f"a grid of {grid} cells (z, y, x) needs {_readable(dense / 2**30, ',.1f')} GiB for "
            f"the dense bird's-eye view; the demo stops at {_BEV_LIMIT / 2**30:.0f} GiB. Take a "
            "larger --voxel-size or a smaller --range."
        )
    return z, y, x


def _readable(value: float, form: str) -> str:
    """A number of any size, in a few characters."""
    return format(value, form) if value <= 1e9 else "more than 1e9"


def voxelize(
    cloud: PointCloud, voxel_size: float, device: torch.device, crop: Sequence[float] | None = None
) -> VoxelGrid:
    """Voxelise with `spconv.pytorch.utils.PointToVoxel`, as projects do.

    Raises:
        SettingError: `voxel_size` or `crop` make no sense.
        GeometryError: the grid is too large for the dense bird's-eye view, or holds no point.
    """
    from spconv.pytorch.utils import PointToVoxel

    if not _SMALLEST <= voxel_size < math.inf:
        raise SettingError(f"voxel size is {voxel_size}; expected finite metres, {_SMALLEST:g} or more.")
    crop = crop_of(cloud, voxel_size) if crop is None else crop
    shape = grid_shape(crop, voxel_size)
    points = torch.from_numpy(cloud.points).to(device)
    to_voxels = PointToVoxel(
        vsize_xyz=[voxel_size] * 3,
        coors_range_xyz=list(crop),
        num_point_features=points.shape[1],
        max_num_voxels=len(points),
        max_num_points_per_voxel=_POINTS_PER_VOXEL,
        device=device,
    )
    voxels, indices, counts = to_voxels(points)
    if len(voxels) == 0:
        raise GeometryError(
            f"none of the {len(points)} points lies in {list(crop)} (x, y, z lowest, then "
            "highest); expected a --range that holds points."
        )
    features = voxels.sum(1) / counts.to(voxels.dtype).unsqueeze(1)
    indices = torch.nn.functional.pad(indices, (1, 0))
    low, high = (torch.tensor(crop[i : i + 3], device=device) for i in (0, 3))
    inside = ((points[:, :3] >= low) & (points[:, :3] < high)).all(1).sum()
    origin = (float(crop[0]), float(crop[1]), float(crop[2]))
    return VoxelGrid(features, indices, shape, origin, voxel_size, int(inside))


@functools.lru_cache(maxsize=8)
def street_voxels(rows: int) -> tuple[torch.Tensor, tuple[int, int, int], int]:
    """(coordinates int32 [rows, 4]: batch, z, y, x; cells in z, y, x; batch size) of 5 cm voxels.

    A sector of a synthetic 64-beam scan, so that few rows are as crowded as many; several scans
    where one does not hold as many.
    """
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < rows:
        points = street_scan(len(parts))[:, :3].astype(np.float64)
        angle = np.abs(np.arctan2(points[:, 1], points[:, 0]))
        cells = np.floor(points[np.argsort(angle, kind="stable")] / _VOXEL).astype(np.int32)
        first = np.sort(np.unique(cells, axis=0, return_index=True)[1])
        cells = cells[first][: rows - sum(map(len, parts)), ::-1]
        parts.append(np.concatenate([np.full((len(cells), 1), len(parts), np.int32), cells], 1))
    coords = np.concatenate(parts)
    coords[:, 1:] -= coords[:, 1:].min(0)
    z, y, x = (-(-(int(most) + 1) // _MULTIPLE) * _MULTIPLE for most in coords[:, 1:].max(0))
    return torch.from_numpy(coords), (max(z, _LOWEST), y, x), len(parts)
