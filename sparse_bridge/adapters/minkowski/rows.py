"""Layers that pick, copy or join rows: broadcast, pruning, union, arithmetic on two maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...core.ops.spread import spread
from ...errors import CoordinateError, DeviceError
from ...log import logger
from .batches import batch_rows
from .errors import FeatureShapeError, TensorDeviceError
from .grid import Grid, Key
from .maps import MapRegistry
from .weights import check_aligned


def broadcast(
    registry: MapRegistry, glob: torch.Tensor, in_key: Key, glob_key: Key
) -> torch.Tensor:
    """The row of `glob` [B, C] of every row's batch item: [N, C].

    Raises: FeatureShapeError, FeatureTypeError, CoordinateError.
    """
    check_aligned(glob, registry.grid(glob_key), "broadcast")
    return spread(glob, batch_rows(registry, in_key, glob_key))


def look_up(
    grid: Grid, features: torch.Tensor, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(features [M, C] at int32 coordinates [M, 1 + D], 0 where there is no row; int64, which of
    them were found)."""
    rows = grid.rows_of(query)
    found = (rows >= 0).nonzero().squeeze(1)
    picked = features.index_select(0, rows.index_select(0, found))
    return features.new_zeros((len(rows), features.shape[1])).index_copy(0, found, picked), found


def prune(
    registry: MapRegistry,
    features: torch.Tensor,
    mask: torch.Tensor,
    in_key: Key,
    given: Key | None = None,
) -> tuple[torch.Tensor, Key]:
    """The rows where `mask` (bool [N]) is set, in order, and the key of their map.

    given: the map that an earlier call made of the same rows; None for a new one.
    Raises: FeatureShapeError, TensorDeviceError, KeyStateError.
    """
    n_rows = registry.grid(in_key).n_rows
    if features.shape[0] != n_rows:
        raise FeatureShapeError(
            f"MinkowskiPruning got features of shape {list(features.shape)} for {n_rows} rows."
        )
    if mask.ndim != 1 or mask.shape[0] != n_rows:
        raise FeatureShapeError(
            f"MinkowskiPruning got a mask of shape {list(mask.shape)}; expected [{n_rows}]."
        )
    if mask.dtype != torch.bool:
        raise FeatureShapeError(
            f"MinkowskiPruning got a {mask.dtype} mask; expected torch.bool (use mask.bool())."
        )
    if mask.device != features.device:
        raise TensorDeviceError(
            f"MinkowskiPruning got a mask on {mask.device}, features on {features.device}."
        )
    rows = mask.nonzero().squeeze(1)
    if rows.shape[0] == 0:
        logger.info("MinkowskiPruning removed every row; the result is an empty tensor.")
    if given is not None and registry.grid(given).n_rows != rows.shape[0]:
        raise FeatureShapeError(
            f"MinkowskiPruning keeps {rows.shape[0]} rows, the given map has "
            f"{registry.grid(given).n_rows}."
        )
    key = registry.pruned(in_key, rows) if given is None else given
    return features.index_select(0, rows), key


def union(
    registry: MapRegistry,
    features: Sequence[torch.Tensor],
    keys: list[Key],
    given: Key | None = None,
) -> tuple[torch.Tensor, Key]:
    """Sum over the present inputs at every coordinate of the union, and its key.

    given: the map that an earlier union of the same maps made; None for a new one.
    Raises: FeatureShapeError, DeviceError, CoordinateError.
    """
    channels = features[0].shape[1]
    for key, part in zip(keys, features, strict=True):
        check_aligned(part, registry.grid(key), "MinkowskiUnion")
        if part.shape[1] != channels:
            raise FeatureShapeError(
                f"MinkowskiUnion got {channels} and {part.shape[1]} channels; all must agree."
            )
        if part.device != features[0].device:
            raise DeviceError("MinkowskiUnion got tensors of different devices.")
    if given is None:
        out_key, rows = registry.merged(keys)
    else:
        out_key = given
        rows = [registry.grid(given).rows_of(registry.grid(key).coords) for key in keys]
        if any(bool((part < 0).any()) for part in rows):
            raise CoordinateError(f"the map {given} is not a union of the maps {keys}.")
    dtype = features[0].dtype
    for part in features[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    total = features[0].new_zeros((registry.grid(out_key).n_rows, channels), dtype=dtype)
    for out_rows, part in zip(rows, features, strict=True):
        # A map's rows are distinct, so no two additions of one step meet.
        total = total.index_add(0, out_rows, part.to(dtype))
    return total, out_key


def combine(
    registry: MapRegistry, a: torch.Tensor, b: torch.Tensor, a_key: Key, b_key: Key,
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, Key]:  # fmt: skip
    """`a op b` on the union of two maps, and its key: Z = a where a is, Z = op(Z, b) where b is.

    So where only a is, its value stays under every operation; where only b is, it is op(0, b).
    Raises: FeatureShapeError.
    """
    out_key, (a_rows, b_rows) = registry.merged([a_key, b_key])
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype), b.to(dtype)
    z = a.new_zeros((registry.grid(out_key).n_rows, a.shape[1])).index_copy(0, a_rows, a)
    try:
        mixed = operation(z.index_select(0, b_rows), b).expand(b.shape[0], a.shape[1])
    except RuntimeError as error:
        raise FeatureShapeError(
            f"tensors of {a.shape[1]} and {b.shape[1]} channels do not combine: {error}"
        ) from None
    return z.index_copy(0, b_rows, mixed), out_key
