"""Sites from per-axis candidates in lexicographic order: the truth for rows that are sorted by
key."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_bridge.core.geometry.boxes import Box

__all__ = ["sorted_sites"]

# (values int64 [N, m], which of them count: bool [N, m] or None for all)
Axis = tuple[torch.Tensor, torch.Tensor | None]


def sorted_sites(batch: torch.Tensor, axes: Sequence[Axis], box: Box) -> torch.Tensor:
    """The distinct sites (batch[i], one candidate of row i per axis), ascending: int32 [M, 1 + D].

    Args:
        batch: integers [N].
        axes: candidates along each of the D axes; row i gives the product of its candidates.
        box: holds every site that counts.

    Waits for the device once or twice.
    """
    return _by_rows(batch, axes) if box.oversized else _by_keys(batch, axes, box)


def _mask(axes: Sequence[Axis]) -> torch.Tensor | None:
    """Which combinations count, [N, m_1 * .. * m_D]; None: all."""
    if all(ok is None for _, ok in axes):
        return None
    mask = torch.ones((axes[0][0].shape[0], 1), dtype=torch.bool, device=axes[0][0].device)
    for values, ok in axes:
        ok = torch.ones_like(values, dtype=torch.bool) if ok is None else ok
        mask = (mask.unsqueeze(2) & ok.unsqueeze(1)).flatten(1)
    return mask


def _by_keys(batch: torch.Tensor, axes: Sequence[Axis], box: Box) -> torch.Tensor:
    key = (batch.long() - box.lo[0]).unsqueeze(1)
    for (values, _), low, extent in zip(axes, box.lo[1:], box.size[1:], strict=True):
        key = (key.unsqueeze(2) * extent + (values - low).unsqueeze(1)).flatten(1)
    mask = _mask(axes)
    keys = torch.unique(key if mask is None else key[mask])
    columns = []
    for low, extent in zip(reversed(box.lo), reversed(box.size), strict=True):
        columns.append((keys % max(1, extent) + low).int())
        keys = torch.div(keys, max(1, extent), rounding_mode="floor")
    return torch.stack(columns[::-1], 1)


def _by_rows(batch: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Cells of an oversized box do not fit a key: whole rows are compared."""
    rows = batch.long().view(-1, 1, 1)
    for values, _ in axes:
        wide = rows.unsqueeze(2).expand(-1, -1, values.shape[1], -1)
        last = values.view(values.shape[0], 1, -1, 1).expand(-1, rows.shape[1], -1, 1)
        rows = torch.cat([wide, last], 3).flatten(1, 2)
    mask = _mask(axes)
    return torch.unique(rows.flatten(0, 1) if mask is None else rows[mask], dim=0).int()
