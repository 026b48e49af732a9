"""`grid_sample_3d`: values of sparse voxels at points."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.geometry.offsets import Offsets, box_offsets
from ...core.maps import map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.key_search import find_rows
from ...core.ops.voxel import devoxelize
from ...errors import DeviceError
from ..ledger import note
from .arguments import check_features, check_tensors
from .errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError, PointTypeError
from .geometry import box_of, grid_shape

_HERE = Offsets.of([(0, 0, 0)])
_CORNERS = box_offsets((2, 2, 2), (1, 1, 1), (0, 0, 0))
_FAR = float(1 << 30)  # beyond every grid, and exact in 32 bits


def grid_sample_3d(
    feats: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], grid: torch.Tensor,
    mode: str = "trilinear",
) -> torch.Tensor:  # fmt: skip
    """Sample voxel features at points; voxel i fills [i, i + 1), its centre is i + 0.5.

    Args:
        feats: [N, C] floating point; differentiable, bitwise repeatable.
        coords: [N, 4] (batch, x, y, z), integers.  shape: (batch, C, S1, S2, S3).
        grid: fp32 [B, L, 3], points in voxels; row b sees the voxels of batch b.
        mode: "trilinear", over the voxels that exist, weights divided by their sum; or "nearest",
            the voxel that contains the point (truncated towards zero). Zeros where there is none.

    Returns: [B, L, C] in feats' dtype.
    Raises: ArgumentShapeError, PointTypeError, ArgumentValueError, DeviceError.
    """
    check_features("grid_sample_3d", feats)
    check_tensors("grid_sample_3d", coords=coords)
    _check(feats, coords, grid, mode)
    batch, channels, extents = grid_shape(shape)
    if channels != feats.shape[1]:
        raise ArgumentValueError(
            f"grid_sample_3d got {feats.shape[1]} channels, its shape says {channels}."
        )
    note("flex_gemm", "grid_sample_3d")
    points = grid.detach()
    index, weights = corner_rows(coords, (batch, *extents), points, mode)
    y = devoxelize(feats, index, weights)
    if mode == "trilinear":  # a point that is no number has no value
        y = y.masked_fill(points.isnan().any(2).view(-1, 1), float("nan"))
    return y.view(*grid.shape[:2], feats.shape[1])


def corner_rows(
    coords: torch.Tensor, sizes: Sequence[int], grid: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Voxels around points and their weights: rows int32 [B * L, K], -1 where there is none, and
    fp32 [B * L, K]; K is 1 ("nearest") or 8.  sizes: (batch, S1, S2, S3)."""
    box = box_of(sizes[0], sizes[1:])
    rows = coords if coords.dtype == torch.int32 else _whole(coords)
    store = map_cache.store_of(rows)
    cmap = store.get(("coordinates", box), lambda: CoordinateMap(rows, box))
    return (_nearest if mode == "nearest" else _trilinear)(cmap, grid)


class GridSample3dFunction:
    """The name of FlexGEMM's autograd function; gradients belong to the sampling itself."""

    apply = staticmethod(grid_sample_3d)


def _check(feats: torch.Tensor, coords: torch.Tensor, grid: torch.Tensor, mode: str) -> None:
    if mode not in ("nearest", "trilinear"):
        raise ArgumentShapeError(f"mode is {mode!r}; expected 'nearest' or 'trilinear'.")
    if feats.ndim != 2 or coords.ndim != 2 or coords.shape[1] != 4 or len(feats) != len(coords):
        raise ArgumentShapeError(
            f"grid_sample_3d got features {list(feats.shape)} and coordinates "
            f"{list(coords.shape)}; expected [N, C] and [N, 4]."
        )
    check_points("grid_sample_3d", grid)
    if not feats.device == coords.device == grid.device:
        raise DeviceError(
            f"grid_sample_3d got features on {feats.device}, coordinates on {coords.device} and "
            f"points on {grid.device}; move all to one device."
        )


def check_points(what: str, grid: torch.Tensor) -> None:
    """fp32 [B, L, 3]. Raises ArgumentTypeError, ArgumentShapeError, PointTypeError."""
    check_tensors(what, grid=grid)
    if grid.ndim != 3 or grid.shape[2] != 3:
        raise ArgumentShapeError(
            f"{what} got points of shape {list(grid.shape)}; expected [B, L, 3]."
        )
    if grid.dtype != torch.float32:
        raise PointTypeError(
            f"{what} got points of {grid.dtype}; expected torch.float32 (use .float())."
        )


def _whole(coords: torch.Tensor) -> torch.Tensor:
    """Coordinates of another dtype as int32; what does not fit lies in no grid."""
    if coords.is_complex() or coords.dtype == torch.bool:
        raise ArgumentTypeError(f"grid_sample_3d got coordinates of {coords.dtype}; use .int().")
    if coords.is_floating_point():
        coords = coords.double().nan_to_num(nan=-_FAR, posinf=_FAR, neginf=-_FAR).trunc()
    return coords.clamp(-int(_FAR), int(_FAR)).int() if coords.itemsize > 4 else coords.int()


def _query(cells: torch.Tensor) -> torch.Tensor:
    """int32 [B * L, 4] from cells [B, L, 3]; NaN counts as cell 0."""
    cells = cells.nan_to_num(nan=0.0, posinf=_FAR, neginf=-_FAR).clamp(-_FAR, _FAR).int()
    items = torch.arange(cells.shape[0], dtype=torch.int32, device=cells.device)
    batch = items.view(-1, 1, 1).expand(-1, cells.shape[1], 1)
    return torch.cat([batch, cells], 2).flatten(0, 1)


def _nearest(cmap: CoordinateMap, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = find_rows(cmap, _query(grid.trunc()), _HERE, (1, 1, 1)).t()
    return rows, torch.ones(rows.shape, dtype=torch.float32, device=rows.device)


def _trilinear(cmap: CoordinateMap, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights [B * L, 8] of the corners."""
    base = torch.floor(grid - 0.5)
    rows = find_rows(cmap, _query(base), _CORNERS, (1, 1, 1)).t().contiguous()
    upper = (grid - 0.5 - base).flatten(0, 1)  # share of the upper cell, per axis
    low_high = torch.stack([1 - upper, upper], 2)
    x, y, z = low_high.unbind(1)
    weights = (x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).flatten(1)
    weights = torch.where(rows >= 0, weights, 0)
    return rows, weights / weights.sum(1, keepdim=True).clamp(min=1e-12)
