"""Values between the voxels of a map, and spreading points onto voxels."""

from __future__ import annotations

import torch

from ...core.ops.interpolate import corners, interpolation
from ...core.ops.row_matrix import RowMatrix
from ...errors import ContractError, CoordinateError
from .registry import Key, MapRegistry

__all__ = ["interpolation_matrix", "splat_points"]


def _check(registry: MapRegistry, query: torch.Tensor) -> None:
    if query.ndim != 2 or query.shape[1] != registry.dimension + 1:
        raise ContractError(
            f"positions have shape {list(query.shape)}; "
            f"expected [M, {registry.dimension + 1}], batch index first."
        )
    if not bool(torch.isfinite(query).all()):
        raise CoordinateError("positions must be finite; drop the rows with NaN or infinity.")


def interpolation_matrix(registry: MapRegistry, key: Key, query: torch.Tensor) -> RowMatrix:
    """Multilinear interpolation at absolute positions, from the rows of `key` to those of `query`.

    query: float [M, 1 + D]; its batch index is rounded.  Corners lie on multiples of the tensor
    stride; absent ones count as zero, nothing is renormalised.
    Raises: ContractError, CoordinateError.
    """
    _check(registry, query)
    grid = registry.grid(key)
    unit = torch.tensor(grid.unit[::-1], dtype=torch.float64, device=query.device)
    spacing = tuple(max(1, t) // u for t, u in zip(grid.stride, grid.unit, strict=True))[::-1]
    exact = query.double()
    position = exact[:, 1:].flip(1) / unit
    return interpolation(grid.own_view(), exact[:, 0].round().long(), position, spacing)


def splat_points(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2^D integer corners of every point [N, 1 + D]: int64 [N * 2^D, 1 + D], and their weights.

    Weights are float64 [N * 2^D], sorted by point.  Raises: CoordinateError.
    """
    exact = coords.double()
    if not bool(torch.isfinite(exact).all()):
        raise CoordinateError("points must be finite; drop the rows with NaN or infinity.")
    points, weights = corners(exact[:, 1:], (1,) * (coords.shape[1] - 1))
    batch = exact[:, 0].round().long().view(-1, 1, 1).expand(-1, points.shape[1], 1)
    return torch.cat([batch, points], 2).flatten(0, 1), weights.flatten()
