"""Pools over batch items."""

from __future__ import annotations

from typing import Any

import torch

from ....core.maps import map_cache
from ....core.maps.rows import batch_of_input, fixed_items
from ....core.ops.pool import global_pool
from ....refusals import Refusal, Why
from ...call_stats import note
from .. import profile as profiles
from ..maps import bounds_of
from ..tensors import check_input, item_counts


def global_pool_forward(x: Any, mode: str) -> torch.Tensor:
    """Mean ("avg") or maximum ("max") of each batch item, [B, C], B = largest batch index + 1.

    An item without rows has a mean of NaN, as in torchsparse, and no maximum: CoordinateError.
    """
    layer_name = {"avg": "GlobalAvgPool", "max": "GlobalMaxPool"}[mode]
    feats, coords = check_input(x, layer_name)
    release = profiles.current()
    column = release.batch_column
    if torch.compiler.is_compiling():
        from .. import compiled

        counts = compiled.ops.torchsparse_items(coords, column, layer_name)
        y = compiled.ops.global_pool(feats, coords[:, column], counts.shape[0], mode)
    elif (items := fixed_items()) is not None:
        note("torchsparse", layer_name)
        return global_pool(feats, coords[:, column], items, mode)
    elif (span := batch_of_input()) is not None:  # a replay, whose inputs have rows of each of these items
        if span[0]:
            raise Refusal(Why.GRAPH_BATCH_ITEMS)
        note("torchsparse", layer_name)
        return global_pool(feats, coords[:, column], span[1], mode)
    else:
        low, high = bounds_of(map_cache.store_of(coords), coords, release)
        counts = item_counts(coords[:, column], low[0], high[0], layer_name)
        y = global_pool(feats, coords[:, column], counts.shape[0], mode)
    note("torchsparse", layer_name)
    return y if mode == "max" else torch.where((counts > 0).unsqueeze(1), y, torch.nan)
