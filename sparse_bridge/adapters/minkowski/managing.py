"""What `CoordinateManager` offers beyond the maps themselves."""

from __future__ import annotations

import torch

from ...core.ops.row_matrix import RowMatrix
from ...errors import ContractError, CoordinateError
from .errors import KeyStateError
from .fields import FieldMap
from .interpolate import interpolation_matrix
from .layers import KernelSpec
from .pools import cell_matrix
from .registry import Key, MapRegistry
from .relations import item_rows, kernel_pairs, parent_rows, relation, rows_of

__all__ = [
    "every_point_row",
    "field_items",
    "insert_field",
    "interpolation_pairs",
    "kernel_map_pairs",
    "origin_field_rows",
    "origin_rows",
    "point_rows",
    "slice_matrix",
    "stride_pairs",
    "union_pairs",
    "voxelize",
]

Voxelized = tuple[Key, torch.Tensor | None, torch.Tensor]


def insert_field(
    registry: MapRegistry, coords: torch.Tensor, stride: tuple[int, ...], name: str = ""
) -> Key:
    """Enter the coordinates [N, 1 + D] of points; the key of the field."""
    registry.use_device(coords.device)
    key = registry.free_field_key(stride, name)
    registry.fields[key] = FieldMap(coords, stride)
    return key


def voxelize(
    registry: MapRegistry, field_key: Key, stride: tuple[int, ...], name: str = ""
) -> Voxelized:
    """A new map of the voxels that hold the points of a field; returns as `MapRegistry.insert`."""
    field = registry.field(field_key)
    key, first, inverse = registry.insert(field.cells(stride), stride, name)
    field.rows[key] = inverse
    return key, first, inverse


def point_rows(registry: MapRegistry, field_key: Key, key: Key) -> torch.Tensor:
    """int64 [N]: the row of `key` whose voxel holds each point of the field, -1 for none."""
    field = registry.field(field_key)
    found = field.rows.get(key)
    if found is None:
        grid = registry.grid(key)
        found = field.rows[key] = rows_of(grid, field.cells(grid.stride))
    return found


def every_point_row(registry: MapRegistry, field_key: Key, key: Key) -> torch.Tensor:
    """`point_rows` where every point must have a voxel. Raises CoordinateError."""
    rows = point_rows(registry, field_key, key)
    missing = int((rows < 0).sum())
    if missing:
        raise CoordinateError(
            f"{missing} of {len(rows)} points have no voxel on the map {key} (it was pruned, or "
            "made from other points); use interpolate() or features_at_coordinates() instead."
        )
    return rows


def slice_matrix(registry: MapRegistry, field_key: Key, key: Key) -> RowMatrix:
    """From the rows of `key` to the points of the field, each of which must have a voxel.

    Raises: CoordinateError.
    """
    found = registry.slices.get((field_key, key))
    if found is None:
        rows = every_point_row(registry, field_key, key)
        points = torch.arange(len(rows), device=rows.device)
        found = RowMatrix(points, rows, None, len(rows), registry.grid(key).n_rows)
        registry.slices[field_key, key] = found
    return found


def field_items(registry: MapRegistry, field_key: Key, origin: Key) -> torch.Tensor:
    """int64 [N]: the row of the origin map of every point's batch index."""
    batches = registry.grid(origin).coords[:, 0].long()
    return torch.searchsorted(batches, registry.field(field_key).coords[:, 0].round().long())


def stride_pairs(
    registry: MapRegistry, in_key: Key, out_key: Key
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of `in_key`, the rows of `out_key` whose cell holds them), int64."""
    parents = parent_rows(registry, in_key, out_key)
    rows = (parents >= 0).nonzero().squeeze(1)
    return rows, parents.index_select(0, rows)


def kernel_map_pairs(
    registry: MapRegistry, in_key: Key, out_key: Key, spec: KernelSpec, transposed: bool, pool: bool
) -> dict[int, torch.Tensor]:  # fmt: skip
    """{offset: int32 [2, n]} (input rows, output rows); see `relations.kernel_pairs`."""
    if pool and spec.cells:
        fine, coarse = (out_key, in_key) if transposed else (in_key, out_key)
        matrix = cell_matrix(registry, fine, coarse)
        if not len(matrix.in_rows):
            return {}
        pair = (
            (matrix.out_rows, matrix.in_rows) if transposed else (matrix.in_rows, matrix.out_rows)
        )
        return {0: torch.stack(pair).int()}
    if transposed:
        return kernel_pairs(relation(registry, out_key, in_key, spec.region).transposed())
    return kernel_pairs(relation(registry, in_key, out_key, spec.region))


def _by_item(registry: MapRegistry, batch: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    present = registry.batches()
    n_items = int(present[-1]) + 1 if len(present) else 0
    return present, item_rows(batch, n_items)


def origin_rows(registry: MapRegistry, key: Key) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(batch indices present in the manager [B], ascending rows of each index 0 .. max), int64."""
    return _by_item(registry, registry.grid(key).coords[:, 0])


def origin_field_rows(registry: MapRegistry, key: Key) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`origin_rows` of a field."""
    return _by_item(registry, registry.field(key).coords[:, 0].round())


def union_pairs(
    registry: MapRegistry, keys: list[Key], out_is_set: bool
) -> tuple[Key, list[torch.Tensor]]:
    """(key of the union, int64 [2, N_i] rows of each map and their union rows).

    Raises: KeyStateError, ContractError.
    """
    if out_is_set:
        raise KeyStateError("union_map needs an unset out_key: CoordinateMapKey(D + 1).")
    if len(keys) < 1:
        raise ContractError("union_map needs one or more keys.")
    out, rows = registry.merged(keys)
    every = [torch.arange(len(part), device=part.device) for part in rows]
    return out, [torch.stack(pair) for pair in zip(every, rows, strict=True)]


def interpolation_pairs(
    registry: MapRegistry, key: Key, samples: torch.Tensor
) -> list[torch.Tensor]:
    """[input rows int32, sample rows int32, weights] of the corners that exist, by sample."""
    matrix = interpolation_matrix(registry, key, samples)
    assert matrix.weights is not None
    return [matrix.in_rows.int(), matrix.out_rows.int(), matrix.weights.to(samples.dtype)]
