"""Values of voxels at points: which rows a point reads, and with what weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.geometry.offsets import Offsets, box_offsets
from ...core.maps import map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.key_search import find_rows
from ...core.ops.voxel import devoxelize
from .errors import ArgumentTypeError
from .geometry import box_of

_CENTRE = Offsets.of([(0, 0, 0)])
_CORNERS = box_offsets((2, 2, 2), (1, 1, 1), (0, 0, 0))
_FAR = float(1 << 30)  # beyond every grid, and exact in 32 bits


def sampled(
    feats: torch.Tensor, coords: torch.Tensor, sizes: Sequence[int], grid: torch.Tensor, mode: str
) -> torch.Tensor:
    """`grid_sample_3d` of arguments that were checked.  sizes: (batch, S1, S2, S3)."""
    points = grid.detach()
    index, weights = corner_rows(coords, sizes, points, mode)
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
    rows = coords if coords.dtype == torch.int32 else _as_int32(coords)
    store = map_cache.store_of(rows)
    cmap = store.get(("coordinates", box), lambda: CoordinateMap(rows, box))
    return (_nearest if mode == "nearest" else _trilinear)(cmap, grid)


def _as_int32(coords: torch.Tensor) -> torch.Tensor:
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
    rows = find_rows(cmap, _query(grid.trunc()), _CENTRE, (1, 1, 1)).t()
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
