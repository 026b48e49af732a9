"""Layers that pick, copy or join rows: broadcast, pruning, union, arithmetic on two maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.arguments import expect_tensors
from ...core.ops.spread import spread
from ...core.traced import between_graphs
from ...errors import CoordinateError, DeviceError
from ...log import logger
from .batches import batch_rows
from .errors import FeatureShapeError, TensorDeviceError
from .grid import Grid, Key
from .maps import MapRegistry
from .weights import check_aligned


def broadcast(registry: MapRegistry, glob: torch.Tensor, in_key: Key, glob_key: Key) -> torch.Tensor:
    """The row of `glob` [B, C] of every row's batch item: [N, C].

    Raises: FeatureShapeError, FeatureTypeError, CoordinateError.
    """
    if torch.compiler.is_compiling():
        from . import compiled

        if not compiled.all_traced(registry, (in_key, glob_key)):
            return compiled.outside(broadcast, registry, glob, in_key, glob_key)
        return compiled.broadcast(registry, glob, in_key, glob_key)
    check_aligned(glob, registry.grid(glob_key), "broadcast")
    return spread(glob, batch_rows(registry, in_key, glob_key))


def coords_in_graph(manager: Any, key: Key) -> torch.Tensor | None:
    """The coordinates of a CoordinateManager's map that a graph made, as users see them."""
    from . import compiled

    return compiled.coords_of(manager._manager, key)


@between_graphs
def look_up(grid: Grid, features: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(features [M, C] at int32 coordinates [M, 1 + D], 0 where there is no row; int64, which of
    them are present)."""
    rows = grid.rows_of(query)
    hits = (rows >= 0).nonzero().squeeze(1)
    picked = features.index_select(0, rows.index_select(0, hits))
    return features.new_zeros((len(rows), features.shape[1])).index_copy(0, hits, picked), hits


def prune(
    registry: MapRegistry, features: torch.Tensor, mask: torch.Tensor, in_key: Key, target: Key | None = None
) -> tuple[torch.Tensor, Key]:
    """The rows where `mask` (bool [N]) is set, in order, and the key of their map.

    target: the map that an earlier call made of the same rows; None for a new one.
    Raises: FeatureShapeError, TensorDeviceError, KeyStateError.
    """
    if torch.compiler.is_compiling():
        from . import compiled

        if target is not None or compiled.traced_sites(registry, in_key) is None:
            return compiled.outside(prune, registry, features, mask, in_key, target)
        _check_mask(mask, features)
        return compiled.pruned(registry, features, mask, in_key)
    n_rows = registry.grid(in_key).n_rows
    if features.shape[0] != n_rows:
        raise FeatureShapeError(f"MinkowskiPruning got features of shape {list(features.shape)} for {n_rows} rows.")
    expect_tensors("MinkowskiPruning", mask=mask)
    if mask.ndim != 1 or mask.shape[0] != n_rows:
        raise FeatureShapeError(f"MinkowskiPruning got a mask of shape {list(mask.shape)}; expected [{n_rows}].")
    _check_mask(mask, features)
    rows = mask.nonzero().squeeze(1)
    if rows.shape[0] == 0:
        logger.info("MinkowskiPruning removed every row; the result is an empty tensor.")
    if target is not None and registry.grid(target).n_rows != rows.shape[0]:
        raise FeatureShapeError(
            f"MinkowskiPruning keeps {rows.shape[0]} rows, the given map has {registry.grid(target).n_rows}."
        )
    key = registry.pruned(in_key, rows) if target is None else target
    return features.index_select(0, rows), key


def _check_mask(mask: torch.Tensor, features: torch.Tensor) -> None:
    if mask.dtype != torch.bool:
        raise FeatureShapeError(f"MinkowskiPruning got a {mask.dtype} mask; expected torch.bool (use mask.bool()).")
    if mask.device != features.device:
        raise TensorDeviceError(f"MinkowskiPruning got a mask on {mask.device}, features on {features.device}.")


def union(
    registry: MapRegistry, features: Sequence[torch.Tensor], keys: list[Key], target: Key | None = None
) -> tuple[torch.Tensor, Key]:
    """Sum over the present inputs at every coordinate of the union, and its key.

    target: the map that an earlier union of the same maps made; None for a new one.
    Raises: FeatureShapeError, DeviceError, CoordinateError.
    """
    if torch.compiler.is_compiling() and not _joined_in_graph(registry, keys, target):
        from . import compiled

        return compiled.outside(union, registry, features, keys, target)
    channels = features[0].shape[1]
    for key, part in zip(keys, features, strict=True):
        if not torch.compiler.is_compiling():
            check_aligned(part, registry.grid(key), "MinkowskiUnion")
        if part.shape[1] != channels:
            raise FeatureShapeError(f"MinkowskiUnion got {channels} and {part.shape[1]} channels; all must agree.")
        if part.device != features[0].device:
            raise DeviceError("MinkowskiUnion got tensors of different devices.")
    if target is None:
        out_key, rows, n_rows = _merged(registry, keys)
    else:
        out_key = target
        rows = [registry.grid(target).rows_of(registry.grid(key).coords) for key in keys]
        if any(bool((part < 0).any()) for part in rows):
            raise CoordinateError(f"the map {target} is not a union of the maps {keys}.")
        n_rows = registry.grid(target).n_rows
    dtype = features[0].dtype
    for part in features[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    total = features[0].new_zeros((n_rows, channels), dtype=dtype)
    for out_rows, part in zip(rows, features, strict=True):
        # A map's rows are distinct, so no two additions of one step meet.
        total = total.index_add(0, out_rows, part.to(dtype))
    return total, out_key


def _joined_in_graph(registry: MapRegistry, keys: list[Key], target: Key | None) -> bool:
    from . import compiled

    return target is None and compiled.all_traced(registry, keys)


def _merged(registry: MapRegistry, keys: list[Key]) -> tuple[Key, list[torch.Tensor], int]:
    """A new map of the union, its rows of every map's rows (int64), and how many it has."""
    if torch.compiler.is_compiling():
        from . import compiled

        return compiled.merged(registry, keys)
    key, rows = registry.merged(keys)
    return key, rows, registry.grid(key).n_rows


def combine(
    registry: MapRegistry,
    a: torch.Tensor,
    b: torch.Tensor,
    a_key: Key,
    b_key: Key,
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, Key]:
    """`a op b` on the union of two maps, and its key: Z = a where a is, Z = op(Z, b) where b is.

    So where only a is, its value stays under every operation; where only b is, it is op(0, b).
    Raises: FeatureShapeError.
    """
    if torch.compiler.is_compiling() and not _joined_in_graph(registry, [a_key, b_key], None):
        from . import compiled

        return compiled.outside(combine, registry, a, b, a_key, b_key, operation)
    out_key, (a_rows, b_rows), n_rows = _merged(registry, [a_key, b_key])
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(dtype), b.to(dtype)
    z = a.new_zeros((n_rows, a.shape[1])).index_copy(0, a_rows, a)
    try:
        mixed = operation(z.index_select(0, b_rows), b).expand(b.shape[0], a.shape[1])
    except RuntimeError as error:
        raise FeatureShapeError(f"tensors of {a.shape[1]} and {b.shape[1]} channels do not combine: {error}") from None
    return z.index_copy(0, b_rows, mixed), out_key
