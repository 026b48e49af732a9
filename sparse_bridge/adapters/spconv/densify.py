"""`SparseConvTensor.dense()`."""

from __future__ import annotations

from typing import Any

import torch

from ...core.capture import padded
from .layers import box_of
from .maps import check_inside

__all__ = ["dense"]


def dense(x: Any, channels_first: bool) -> torch.Tensor:
    """[B, C, *shape] contiguous, or [B, *shape, C]; zeros where nothing is; differentiable.

    Of rows that share a site one stays. Negative indices count from the end, as in Python.
    Raises SiteRangeError for rows beyond the grid.
    """
    padded.forbid("dense()")
    features, box = x._features, box_of(x)
    check_inside(x.indices, box)
    result = features.new_zeros((*box.size, features.shape[1]))
    result = result.index_put(tuple(x.indices.long().t()), features)
    if not channels_first:
        return result
    return result.permute(0, -1, *range(1, len(box.size))).contiguous()
