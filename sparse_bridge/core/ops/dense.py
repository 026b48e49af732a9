"""Dense grids from rows of features and their coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.runtime.target import Target
from ..device.device_support import kernel_target
from ..device.precision import KERNEL_DTYPES
from ..geometry.constants import constant
from ..maps.rows import Rows, register_grid


class Outside(NamedTuple):
    """A coordinate that leaves a grid: its row, its column (0 is the batch), and how many do."""

    row: int
    column: int
    n_outside: int


def first_outside(coords: torch.Tensor, shape: Sequence[int], *, negative: bool = False) -> Outside | None:
    """The first entry of coords [N, 1 + D], int32 or int64, that is not in 0 <= c < shape, or None.

    shape: sizes per column, batch first.  negative: -size <= c < 0 counts from the end, as in Python, and is inside.
    Waits for the device.
    """
    limit = torch.tensor(tuple(shape), device=coords.device)
    wrong = ((coords >= limit) | (coords < (-limit if negative else 0))).nonzero()
    if not wrong.shape[0]:
        return None
    row, column = wrong[0].tolist()
    return Outside(row, column, wrong.shape[0])


def to_dense(
    features: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    *,
    channels_first: bool = True,
    last_wins: bool = False,
    rows: Rows | None = None,
) -> torch.Tensor:
    """Zeros with the rows of `features` written at their coordinates; differentiable.

    features: [N, C].  coords: integers [N, 1 + D], batch first, all inside of the grid (see
        `first_outside`); negative ones count from the end.
    shape: sizes (B, X_1 .. X_D).
    last_wins: of rows with equal coordinates the last one stays, everywhere, and it alone has a
        gradient; needs 0 <= coords. Otherwise one stays, and all of them get its gradient.
    rows: those in use; where only the device knows them, 0 <= coords are distinct there.
    Returns [B, C, X_1 .. X_D] contiguous, or [B, X_1 .. X_D, C].
    """
    if last_wins:
        coords, features = _last_rows(coords, features, shape)
    if rows is not None and rows.device is not None:
        register_grid(shape[0])
        if (target := _target_of(features)) is not None:
            return _by_kernel(features, coords, shape, rows.device, channels_first, target)
        grid = _rows_in_use(features, coords, shape, rows.device)
    else:
        grid = features.new_zeros((*shape, features.shape[1]))
        grid = grid.index_put(tuple(coords.long().t()), features)
    if not channels_first:
        return grid
    return grid.permute(0, -1, *range(1, len(shape))).contiguous()


def _target_of(features: torch.Tensor) -> Target | None:
    """The target whose kernel writes the grid; None where torch does, which knows the gradient."""
    differentiable = torch.is_grad_enabled() and features.requires_grad
    return None if differentiable or features.dtype not in KERNEL_DTYPES else kernel_target(features.device)


def _by_kernel(
    features: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], last: torch.Tensor, first: bool, target: Target
) -> torch.Tensor:
    """The grid of rows 0 .. last, in one launch. first: channels come behind the batch."""
    from ...kernels.ops.dense_rows import dense_rows

    sizes, channels = constant(tuple(shape), features.device), features.shape[1]
    grid = features.new_zeros((shape[0], channels, *shape[1:]) if first else (*shape, channels))
    return dense_rows(features.contiguous(), coords.int().contiguous(), sizes, last, grid, first, target)


def _rows_in_use(
    features: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], last: torch.Tensor
) -> torch.Tensor:
    """The grid of rows 0 .. last; what is behind them goes into a cell behind the grid."""
    n_cells = math.prod(shape)
    number = torch.arange(len(coords), device=coords.device)
    index = torch.where(number <= last, _cell_of(coords, shape), n_cells)
    flat = features.new_zeros((n_cells + 1, features.shape[1])).index_put((index,), features)
    return flat[:n_cells].view(*shape, features.shape[1])


def _cell_of(coords: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """int64 [N]: the cells of a grid in the order of memory."""
    index: torch.Tensor = coords[:, 0].long()
    for column, size in enumerate(shape[1:], 1):
        index = index * size + coords[:, column].long()
    return index


def _last_rows(coords: torch.Tensor, features: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows with equal coordinates the last."""
    index = _cell_of(coords, shape)
    ordered, order = torch.sort(index, stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    rows = order[last]
    return coords.index_select(0, rows), features.index_select(0, rows)
