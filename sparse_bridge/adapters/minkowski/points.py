"""Points at float coordinates: fields, interpolation between voxels, spreading onto voxels."""

from __future__ import annotations

import torch

from ...core.arguments import expect_tensors
from ...core.device.stream_order import StreamCache
from ...core.ops.interpolate import corners, interpolation
from ...core.ops.row_matrix import RowMatrix
from ...errors import ContractError, CoordinateError
from .grid import Grid, Key


class FieldMap:
    """Coordinates [N, 1 + D] of points, batch first.

    coords: float32, as the manager shows them.  exact: the integers behind them if they were
    integers, so that large ones keep every digit.  rows: rows on maps made from this field, by key.
    """

    def __init__(self, coords: torch.Tensor, stride: tuple[int, ...]) -> None:
        self.exact = None if coords.is_floating_point() else coords.detach().clone()
        self.coords = coords.detach().to(torch.float32, copy=True)
        self.stride = stride
        self.rows: StreamCache[Key, torch.Tensor] = StreamCache()

    def cells(self, stride: tuple[int, ...]) -> torch.Tensor:
        """float64 or int64 [N, 1 + D]: every point rounded down to multiples of `stride`, its batch
        index to the nearest integer."""
        coords = self.coords.double() if self.exact is None else self.exact.long()
        step = coords.new_tensor([max(1, s) for s in stride])
        axes = torch.div(coords[:, 1:], step, rounding_mode="floor") * step
        return torch.cat([coords[:, :1].round(), axes], 1)


def _check(grid: Grid, query: torch.Tensor) -> None:
    if query.ndim != 2 or query.shape[1] != grid.dimension + 1:
        raise ContractError(
            f"positions have shape {list(query.shape)}; expected [M, {grid.dimension + 1}], batch index first."
        )
    if not bool(torch.isfinite(query).all()):
        raise CoordinateError("positions must be finite; drop the rows with NaN or infinity.")


def interpolation_matrix(grid: Grid, query: torch.Tensor) -> RowMatrix:
    """Multilinear interpolation at absolute positions, from the rows of `grid` to those of `query`.

    query: float [M, 1 + D]; its batch index is rounded.  Corners lie on multiples of the tensor
    stride; absent ones count as zero, nothing is renormalised.
    Raises: ContractError, CoordinateError.
    """
    expect_tensors("interpolation", positions=query)
    _check(grid, query)
    unit = torch.tensor(grid.unit[::-1], dtype=torch.float64, device=query.device)
    spacing = tuple(max(1, t) // u for t, u in zip(grid.stride, grid.unit, strict=True))[::-1]
    exact = query.double()
    position = exact[:, 1:].flip(1) / unit
    return interpolation(grid.own_view(), exact[:, 0].round().long(), position, spacing)


def splat_points(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2^D integer corners of every point [N, 1 + D]: float64 [N * 2^D, 1 + D], and their
    weights, float64 [N * 2^D], sorted by point. Points that are not finite have no batch index."""
    exact = coords.double()
    points, weights = corners(exact[:, 1:], (1,) * (coords.shape[1] - 1))
    batch = torch.where(exact.isfinite().all(1), exact[:, 0].round(), torch.nan)
    batch = batch.view(-1, 1, 1).expand(-1, points.shape[1], 1)
    return torch.cat([batch, points], 2).flatten(0, 1), weights.flatten()
