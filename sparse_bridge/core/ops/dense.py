"""Dense grids from rows of features and their coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Outside(NamedTuple):
    """A coordinate that leaves a grid: its row, its column (0 is the batch), and how many do."""

    row: int
    column: int
    n_outside: int


def first_outside(
    coords: torch.Tensor, shape: Sequence[int], *, negative: bool = False
) -> Outside | None:
    """The first entry of coords [N, 1 + D] that is not in 0 <= c < shape, or None.

    shape: sizes per column, batch first.  negative: -size <= c < 0 counts from the end, as in
    Python, and is inside. Waits for the device.
    """
    limit = torch.tensor(tuple(shape), device=coords.device)
    wrong = ((coords >= limit) | (coords < (-limit if negative else 0))).nonzero()
    if not wrong.shape[0]:
        return None
    row, column = wrong[0].tolist()
    return Outside(row, column, wrong.shape[0])


def to_dense(
    features: torch.Tensor, coords: torch.Tensor, shape: Sequence[int], *,
    channels_first: bool = True, last_wins: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Zeros with the rows of `features` written at their coordinates; differentiable.

    features: [N, C].  coords: integers [N, 1 + D], batch first, all inside of the grid (see
        `first_outside`); negative ones count from the end.
    shape: sizes (B, X_1 .. X_D).
    last_wins: of rows with equal coordinates the last one stays, everywhere, and it alone has a
        gradient; needs 0 <= coords. Otherwise one stays, and all of them get its gradient.
    Returns [B, C, X_1 .. X_D] contiguous, or [B, X_1 .. X_D, C].
    """
    if last_wins:
        coords, features = _last_rows(coords, features, shape)
    grid = features.new_zeros((*shape, features.shape[1]))
    grid = grid.index_put(tuple(coords.long().t()), features)
    if not channels_first:
        return grid
    return grid.permute(0, -1, *range(1, len(shape))).contiguous()


def _last_rows(
    coords: torch.Tensor, features: torch.Tensor, shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows with equal coordinates the last."""
    index: Any = coords[:, 0].long()
    for column, size in enumerate(shape[1:], 1):
        index = index * size + coords[:, column].long()
    ordered, order = torch.sort(index, stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    rows = order[last]
    return coords.index_select(0, rows), features.index_select(0, rows)
