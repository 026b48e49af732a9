"""Normalisation: torch's batch norm on features, and instance norm over batch items."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ... import hooks
from ...core.ops.spread import spread
from .pool import pool_items

__all__ = ["batch_norm", "instance_norm"]

_FORWARD = nn.BatchNorm1d.forward


def batch_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """What `norm`, a BatchNorm1d, makes of features [N, C]; called itself where anybody could
    notice that it is not. No rows leave its statistics as they are."""
    if x.shape[0] == 0:  # torch refuses to train on fewer than two rows
        return x.clone()
    if not norm.training and _is_plain(norm) and x.ndim == 2:
        parameters: dict[str, Any] = norm._parameters
        buffers: dict[str, Any] = norm._buffers
        mean, var = buffers["running_mean"], buffers["running_var"]
        if mean is not None and var is not None:
            return torch.batch_norm(
                x, parameters["weight"], parameters["bias"], mean, var, False,
                norm.momentum or 0.0, norm.eps, torch.backends.cudnn.enabled,
            )  # fmt: skip
    return norm(x)


def _is_plain(norm: nn.Module) -> bool:
    """Whether this is torch's own class, and nothing watches it."""
    return (
        type(norm) is nn.BatchNorm1d
        and nn.BatchNorm1d.forward is _FORWARD
        and len(norm._parameters) == 2  # none is an attribute of another kind
        and len(norm._buffers) == 3
        and "forward" not in norm.__dict__
        and not hooks.hooked(norm)
        and not hooks.hooked_everywhere()
    )


def instance_norm(
    features: torch.Tensor, rows: torch.Tensor, n_items: int, eps: float
) -> torch.Tensor:
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
