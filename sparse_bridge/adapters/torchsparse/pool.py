"""Pools over batch items."""

from __future__ import annotations

from typing import Any

import torch

from ...core.maps import map_cache
from ...core.ops.pool import global_pool
from ...errors import CoordinateError, ShapeError
from ..ledger import note
from . import profile as profiles
from .maps import bounds_of
from .tensors import check_input


def global_pool_forward(x: Any, mode: str) -> torch.Tensor:
    """Mean ("avg") or maximum ("max") of each batch item, [B, C], B = largest batch index + 1.

    An item without rows has a mean of NaN, as in torchsparse, and no maximum: CoordinateError.
    """
    what = {"avg": "GlobalAvgPool", "max": "GlobalMaxPool"}[mode]
    feats, coords = check_input(x, what)
    release = profiles.current()
    low, high = bounds_of(map_cache.store_of(coords), coords, release)
    if coords.shape[0] == 0:
        raise ShapeError(
            f"{what} got a tensor without rows, so it cannot tell how many batch items there are; "
            "leave such batches out."
        )
    if low[0] < 0:
        raise CoordinateError(f"{what} got the batch index {low[0]}; expected 0 or more.")
    batch, n_items = coords[:, release.batch_column], high[0] + 1
    y = global_pool(feats, batch, n_items, mode)
    present = torch.bincount(batch.long(), minlength=n_items) > 0
    note("torchsparse", what)
    if mode == "avg":
        return torch.where(present.unsqueeze(1), y, torch.nan)
    if not bool(present.all()):
        item = int((~present).nonzero()[0])
        raise CoordinateError(f"{what}: batch item {item} has no rows, hence no maximum.")
    return y
