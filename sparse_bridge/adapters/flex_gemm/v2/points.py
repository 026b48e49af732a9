"""Values at points, dense grids, and the order of coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ....core.maps.key_search import find_rows
from ....core.ops.dense import first_outside, to_dense
from ....core.ops.voxel import devoxelize
from ....core.traced import between_graphs
from ...call_stats import note
from ..arguments import INTEGERS, check_features, check_tensors, per_axis
from ..errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError, PointTypeError
from ..lattice import Lattice, columns_of, lattice
from .windows import split

__all__ = ["coalesce_coords", "sort_coords", "sparse_grid_sample", "sparse_to_dense"]

PADDINGS = ("normalize", "zeros")
_FAR = float(1 << 30)  # beyond every grid, and exact in 32 bits


@between_graphs
def sparse_grid_sample(
    feats: torch.Tensor,
    coords: torch.Tensor,
    grid: torch.Tensor,
    *,
    mode: str = "linear",
    padding_mode: str = "normalize",
    n_spatial_dims: int | None = None,
    return_mask: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sample voxel features at points; the centre of voxel i is i.

    Args:
        feats: [N, C]; differentiable, bitwise repeatable. The points have no gradient.
        coords: int32 [N, batch columns + D].  grid: floating [..., batch columns + D].
        mode: "linear" between the 2^D voxels around, or "nearest" (rounds, halves to even).
        padding_mode: "normalize" divides by the weights of the voxels that exist, "zeros" takes
            missing ones as zero.  n_spatial_dims: D; None: all columns but one.

    Returns: [..., C] in feats' dtype, zeros where no voxel is; with return_mask also bool [...],
        whether one was.
    Raises: ArgumentShapeError, ArgumentTypeError, ArgumentValueError, PointTypeError.
    """
    caller = "sparse_grid_sample"
    if mode not in ("linear", "nearest") or padding_mode not in PADDINGS:
        raise ArgumentValueError(
            f"mode is {mode!r}, padding_mode {padding_mode!r}; expected 'linear' or 'nearest', and one of {PADDINGS}."
        )
    check_features(caller, feats)
    check_tensors(caller, coords=coords, grid=grid)
    if coords.ndim != 2 or feats.ndim != 2 or len(feats) != len(coords):
        raise ArgumentShapeError(
            f"{caller} got features {list(feats.shape)} and coordinates {list(coords.shape)}; "
            "expected [N, C] and [N, batch columns + D]."
        )
    dimension = coords.shape[1] - 1
    if n_spatial_dims is not None:
        (dimension,) = per_axis(n_spatial_dims, 1, "n_spatial_dims", 1)
    if grid.ndim < 1 or grid.shape[-1] != coords.shape[1] or grid.device != coords.device:
        raise ArgumentShapeError(
            f"{caller} got points {list(grid.shape)} on {grid.device} for coordinates "
            f"{list(coords.shape)} on {coords.device}; the last axis is that of the coordinates."
        )
    if not grid.is_floating_point():
        raise PointTypeError(f"{caller} got points of {grid.dtype}; expected floating point.")
    own = lattice(coords, dimension, None, caller)
    flat = grid.detach().reshape(-1, coords.shape[1]).double()
    if own.n_batch == 0:
        flat = torch.nn.functional.pad(flat, (1, 0))
    cut = flat.shape[1] - dimension
    batch, points = _cells(flat[:, :cut].round()), flat[:, cut:]
    if mode == "nearest":
        rows = _rows_at(own, batch, points.round(), ((0,) * dimension,))
        weights = (rows >= 0).float()
    else:
        rows, weights = linear_rows(own, batch, points, padding_mode)
    y = devoxelize(feats, rows, weights)
    if mode == "linear":  # a point that is no number has no value
        y = y.masked_fill(points.isnan().any(1, keepdim=True), float("nan"))
    note("flex_gemm", caller)
    y = y.view(*grid.shape[:-1], feats.shape[1])
    return (y, (weights > 0).any(1).view(grid.shape[:-1])) if return_mask else y


def linear_rows(
    own: Lattice, batch: torch.Tensor, points: torch.Tensor, padding_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows int32 [M, 2^D], -1 where there is none, and weights fp32 [M, 2^D] of the voxels around
    points fp64 [M, D]; batch: int32 [M, ...], the columns in front."""
    base = torch.floor(points)
    share = points - base
    corners = tuple(itertools.product((0, 1), repeat=own.dimension))
    rows = _rows_at(own, batch, base, corners)
    upper = torch.tensor(corners, dtype=torch.bool, device=points.device)
    weights = torch.where(upper, share.unsqueeze(1), 1 - share.unsqueeze(1)).prod(2)
    weights = torch.where(rows >= 0, weights, 0)
    if padding_mode == "normalize":
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-12)
    return rows, weights.float()


def _cells(points: torch.Tensor) -> torch.Tensor:
    """int32; NaN counts as cell 0."""
    return points.nan_to_num(nan=0.0, posinf=_FAR, neginf=-_FAR).clamp(-_FAR, _FAR).int()


def _rows_at(
    own: Lattice, batch: torch.Tensor, cells: torch.Tensor, corners: tuple[tuple[int, ...], ...]
) -> torch.Tensor:
    """Rows int32 [M, corners] at cells + corner."""
    query = torch.cat([batch.int(), _cells(cells)], 1)
    steps = own.steps((1,) * own.dimension)
    return find_rows(own.map(), query, own.offsets(corners), steps).t().contiguous()


@between_graphs
def sparse_to_dense(feats: torch.Tensor, coords: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of the batch sizes and extents of `shape`, channels of `feats` last, with the rows
    written in; of equal ones the last. Differentiable. ArgumentValueError for rows outside."""
    caller = "sparse_to_dense"
    check_features(caller, feats)
    _check_rows(caller, coords)
    if feats.ndim != 2 or coords.ndim != 2 or len(feats) != len(coords):
        raise ArgumentShapeError(
            f"{caller} got features {list(feats.shape)} and coordinates {list(coords.shape)}; "
            "expected [N, C] and [N, batch columns + D]."
        )
    sizes = sum(split(shape, 0, coords.shape[1], caller), ())
    wrong = first_outside(coords, sizes)
    if wrong is not None:
        raise ArgumentValueError(f"{caller}: row {wrong.row} leaves the shape {tuple(shape)} in column {wrong.column}.")
    return to_dense(feats, coords, sizes, channels_first=False, last_wins=True)


def _check_rows(caller: str, coords: torch.Tensor) -> None:
    columns_of(coords, 1, caller)
    if coords.dtype not in INTEGERS:
        raise ArgumentTypeError(f"{caller} got coordinates of {coords.dtype}; expected int32 or int64.")


@between_graphs
def sort_coords(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows ascending by columns from the first to the last, int64 [N]: where each one was);
    equal rows keep their order."""
    _check_rows("sort_coords", coords)
    order = torch.arange(coords.shape[0], device=coords.device)
    for column in reversed(range(coords.shape[1])):
        order = order[torch.argsort(coords[order, column], stable=True)]
    return coords.index_select(0, order), order


@between_graphs
def coalesce_coords(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the distinct rows, ascending; int64 [N]: which of them each row is)."""
    _check_rows("coalesce_coords", coords)
    if coords.shape[0] == 0:
        return coords.clone(), torch.zeros(0, dtype=torch.int64, device=coords.device)
    distinct, inverse = torch.unique(coords, dim=0, return_inverse=True)
    return distinct, inverse
