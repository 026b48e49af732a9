"""Norms, and torch's SyncBatchNorm on sparse tensors."""

from __future__ import annotations

from typing import Any

import torch

from ....core.maps import map_cache
from ....core.ops.pool import global_pool
from ....core.ops.spread import spread
from ....errors import CoordinateError, ShapeError
from ...base import Patch
from ...call_stats import note
from .. import profile as profiles
from ..maps import coordinate_map
from ..tensors import check_input, fapply, make_like, range_of


def sync_batch_norm_patch() -> Patch:
    """torch.nn.SyncBatchNorm.forward that also takes a sparse tensor."""

    def factory(original: Any) -> Any:
        def forward(self: Any, input: Any) -> Any:
            if isinstance(input, torch.Tensor) or not hasattr(input, "feats"):
                return original(self, input)
            return fapply(input, lambda feats: original(self, feats))

        return forward

    reason = "convert_sync_batchnorm replaces torchsparse's BatchNorm by torch's own layer"
    return Patch(torch.nn.SyncBatchNorm, "forward", factory, reason, ">=2.4", wraps=True)


def _items(x: Any, coords: torch.Tensor, caller: str) -> tuple[torch.Tensor, int]:
    """(batch index of every row, a number of items that covers them)."""
    release, store = profiles.current(), map_cache.store_of(coords)

    def count() -> int:
        box = coordinate_map(store, coords, release).box
        if box.lo[0] < 0:
            raise CoordinateError(f"{caller} got the batch index {box.lo[0]}; expected 0 or more.")
        return box.lo[0] + box.size[0]

    return coords[:, release.batch_column], store.get("items", count)


def group_norm(x: Any, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Any:
    """GroupNorm over each batch item: statistics of (rows of the item) x (channels of the group).

    Raises ShapeError, CoordinateError.
    """
    feats, coords = check_input(x, "GroupNorm")
    if feats.shape[1] % groups or (weight is not None and weight.shape != (feats.shape[1],)):
        raise ShapeError(
            f"GroupNorm with {groups} groups got {feats.shape[1]} channels"
            + ("." if weight is None else f"; its weight has {weight.shape[0]}.")
        )
    y = _normalise(x, feats, coords, groups, eps, "GroupNorm")
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    note("torchsparse", "GroupNorm")
    return make_like(x, y.to(feats.dtype), x.coords, x.stride, range_of(x))


def instance_norm(x: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Any:
    """InstanceNorm over each batch item: every channel on its own."""
    return group_norm(x, x.feats.shape[1], weight, bias, eps)


def _normalise(x: Any, feats: torch.Tensor, coords: torch.Tensor, groups: int, eps: float, caller: str) -> torch.Tensor:
    n, c = feats.shape
    work = feats if feats.dtype == torch.float64 else feats.float()
    if n == 0:
        return work
    batch, n_items = _items(x, coords, caller)
    rows = batch.long()
    parts = work.view(n, groups, c // groups)
    mean = global_pool(parts.mean(2), batch, n_items, "avg")
    centred = parts - spread(mean, rows).unsqueeze(2)
    variance = global_pool(centred.square().mean(2), batch, n_items, "avg")
    return (centred * spread((variance + eps).rsqrt(), rows).unsqueeze(2)).view(n, c)
