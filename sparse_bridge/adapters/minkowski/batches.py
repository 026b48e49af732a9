"""Batch items of a manager: which there are, and the rows that each has."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ...core.maps.rows import batch_of_input, fixed_items
from ...core.traced import between_graphs
from ...errors import CoordinateError, DataTypeError
from ...refusals import Refusal, Why
from . import profile
from .errors import ItemIndexError
from .grid import Grid, Key
from .maps import MapRegistry


def _present(column: torch.Tensor) -> torch.Tensor:
    """The batch indices in a column, ascending int64. Raises CoordinateError for a negative one."""
    indices = torch.unique(column.round()).long()
    if indices.shape[0] and int(indices[0]) < 0:
        raise CoordinateError(f"batch index {int(indices[0])}; batch indices must be 0 or more.")
    return indices


def batches(registry: MapRegistry) -> torch.Tensor:
    """Batch indices that were inserted, as maps or fields: int64, ascending.

    Raises: CoordinateError (a negative one).
    """
    if (items := fixed_items()) is not None:
        return torch.tensor([*range(items)])
    roots = [grid.coords for grid in registry.grids.values() if grid.source == "inserted"]
    roots += [field.coords for field in registry.fields.values()]
    if not roots:  # a replay's, which has layers' coordinates for a root
        roots = [grid.coords for grid in registry.grids.values()][:1]
    indices = registry.batches.get(len(roots))
    if indices is None:
        parts = [_present(coords[:, 0]) for coords in roots]
        none = torch.empty(0, dtype=torch.int64, device=registry.device)
        indices = torch.unique(torch.cat(parts)) if parts else none
        registry.batches.put(len(roots), indices, indices.device)
    return indices


def origin(registry: MapRegistry) -> Key:
    """The map with one row (b, 0, .., 0) per batch index that was inserted, ascending."""
    span = batch_of_input()
    if span is not None:
        return _origin_of(registry, *span)
    present = batches(registry)
    cached = registry.origin
    if cached is not None and (cached[1] is present or torch.equal(cached[1], present)):
        return cached[0]
    key = registry.free_key((0,) * registry.dimension)
    coords = torch.nn.functional.pad(present.int()[:, None], (0, registry.dimension))
    registry.grids[key] = Grid.around(coords, key[0], "origin")
    registry.origin = (key, present)
    return key


def _origin_of(registry: MapRegistry, low: int, n_items: int) -> Key:
    """`origin` of the input of a replay, whose `n_items` batch indices from `low` on all have rows."""
    if registry.origin is None:
        if not registry.whole:
            raise Refusal(Why.GRAPH_BATCH_ITEMS)
        present = torch.arange(low, low + n_items, dtype=torch.int32, device=registry.device)
        coords = torch.nn.functional.pad(present[:, None], (0, registry.dimension))
        key, zeros = registry.free_key((0,) * registry.dimension), (0,) * registry.dimension
        bounds = (low, *zeros), (low + n_items - 1, *zeros)
        registry.grids[key] = Grid(coords, key[0], (1,) * registry.dimension, bounds, "origin")
        registry.origin = (key, present)
    return registry.origin[0]


def has_items_of_one(registry: MapRegistry) -> bool:
    """Whether all maps have rows of the same batch items: one tensor was entered, and none was pruned or merged."""
    grids = registry.grids.values()
    entered = len(registry.fields) + sum(grid.source == "inserted" and grid.field is None for grid in grids)
    return entered == 1 and not any(grid.source in ("pruned", "merged") for grid in grids)


def batch_rows(registry: MapRegistry, key: Key, glob: Key) -> torch.Tensor:
    """int64 [N]: the row of the map `glob` (one row per batch index) of every row of `key`.

    Raises: CoordinateError.
    """
    if fixed_items() is not None:
        return registry.grid(key).coords[:, 0]
    if (span := batch_of_input()) is not None:
        if registry.origin is None or registry.origin[0] != glob:
            raise Refusal(Why.GRAPH_BATCH_ITEMS)
        return registry.grid(key).coords[:, 0].long() - span[0]
    memo = (key, glob)
    rows = registry.batch_rows.get(memo)
    if rows is None:
        items = registry.grid(glob).coords[:, 0].long()
        ordered, order = torch.sort(items)
        queries = registry.grid(key).coords[:, 0].long()
        index = torch.searchsorted(ordered, queries).clamp(max=max(0, len(ordered) - 1))
        rows = order.index_select(0, index) if len(order) else index
        if len(queries) and not (len(order) and bool((items[rows] == queries).all())):
            raise CoordinateError(
                f"the map {glob} does not have one row for every batch index of {key}; "
                "a global tensor has one row per batch item."
            )
        registry.batch_rows.put(memo, rows, rows.device)
    return rows


def field_items(registry: MapRegistry, field_key: Key, glob: Key) -> torch.Tensor:
    """int64 [N]: the row of the origin map of every point's batch index."""
    items = registry.grid(glob).coords[:, 0].long()
    return torch.searchsorted(items, registry.field(field_key).coords[:, 0].round().long())


def _by_item(registry: MapRegistry, batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    present = batches(registry)
    n_items = int(present[-1]) + 1 if len(present) else 0
    order = torch.sort(batch.long(), stable=True).indices
    counts = torch.bincount(batch.long(), minlength=n_items)[:n_items]
    return present, list(order.split(counts.tolist()))


@between_graphs
def item_rows(registry: MapRegistry, key: Key) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(batch indices present in the manager [B], ascending rows of each index 0 .. max), int64."""
    return _by_item(registry, registry.grid(key).coords[:, 0])


@between_graphs
def field_rows(registry: MapRegistry, key: Key) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`item_rows` of a field."""
    return _by_item(registry, registry.field(key).coords[:, 0].round())


Items = tuple[torch.Tensor, list[torch.Tensor]]  # as `item_rows` returns them


def existing(items: Items) -> list[torch.Tensor]:
    """Rows of every batch index that was entered, ascending."""
    present, rows = items
    return [rows[index] for index in present.tolist()]


def listed(items: Items) -> list[torch.Tensor]:
    """Rows of every entry of `decomposed_*`: of each index 0 .. max; in 0.4 of those that exist."""
    return existing(items) if profile.is_old() else items[1]


def rows_at(items: Items, batch_index: Any) -> torch.Tensor:
    """Rows of one batch index; a negative one counts from the end of `listed`.

    Raises: ItemIndexError.
    """
    if isinstance(batch_index, (str, float, type(None))):
        raise DataTypeError(f"batch index is {batch_index!r}; expected an int.")
    index, rows = operator.index(batch_index), items[1]
    candidates = listed(items) if index < 0 else rows
    if not -len(candidates) <= index < len(candidates):
        span = f"0 .. {len(rows) - 1}" if rows else "none"
        raise ItemIndexError(f"batch index {index}; the coordinate manager has {span}.")
    return candidates[index]
