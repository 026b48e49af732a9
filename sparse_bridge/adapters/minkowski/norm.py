"""Normalisation: torch's batch norm on features, and instance norm over batch items."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.conv.deferred.conv import DeferredConv
from ...core.ops.spread import spread
from ...core.traced import between_graphs
from .. import fusion, inference
from ..training_norms import left_out
from .pool import pool_items


def batch_norm(norm: nn.BatchNorm1d, x: Any) -> inference.Features:
    """What `norm` in eval mode makes of the features of x. No rows leave its statistics as they are
    in training, too."""
    if type(x._late) is DeferredConv:
        return inference.normed(norm, norm, x)
    rows: torch.Tensor = x._F
    if rows.shape[0] == 0:  # torch refuses to train on fewer than two rows
        return left_out(norm, rows.clone())
    return fusion.batch_norm_inference(norm, norm, rows)


@between_graphs
def instance_norm(features: torch.Tensor, rows: torch.Tensor, n_items: int, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) per batch item and channel; biased variance.

    features: [N, C]; half types are computed in float32.  rows: int64 [N], item of every row.
    """
    if features.shape[0] == 0:
        return features.clone()
    half = features.dtype in (torch.float16, torch.bfloat16)
    x = features.float() if half else features
    centred = x - spread(pool_items(x, rows, n_items, "avg"), rows)
    variance = pool_items(centred * centred, rows, n_items, "avg")
    return (centred * spread((variance + eps).rsqrt(), rows)).to(features.dtype)
