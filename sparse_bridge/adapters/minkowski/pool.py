"""Local and global pooling between the maps of a manager, on plain features."""

from __future__ import annotations

import operator

import torch

from ...core.ops.max_rows import window_max
from ...core.ops.pool import global_pool, pool, pool_pairs
from ...core.ops.row_matrix import RowMatrix
from .batches import batch_rows, field_items, origin
from .geometry import KernelSpec, cell_region
from .grid import Key
from .maps import MapRegistry
from .weights import check_aligned, check_features

Pooled = tuple[torch.Tensor, Key]
LARGEST_WINDOW = 64  # offsets; larger cells would want wide tables


def cell_matrix(registry: MapRegistry, in_key: Key, out_key: Key) -> RowMatrix:
    """Sums the rows of `in_key` into the cells of `out_key`; rows without a cell take no part."""
    matrix = registry.cells.get((in_key, out_key))
    if matrix is None:
        x, n_out = registry.grid(in_key), registry.grid(out_key).n_rows
        if in_key == out_key:
            parents = torch.arange(x.n_rows, device=x.device)
        else:
            parents = registry.parent_rows(in_key, out_key)
        x.own_view().rows.require_host_count("a pool over cells")
        rows = (parents >= 0).nonzero().squeeze(1)
        matrix = RowMatrix(parents.index_select(0, rows), rows, None, n_out, x.n_rows)
        registry.cells.put((in_key, out_key), matrix, x.device)
    return matrix


def local_pooling(
    registry: MapRegistry, features: torch.Tensor, mode: str, in_key: Key, spec: KernelSpec, target: Key | None = None
) -> Pooled:
    """Pool [N, C]: (features, key of the output). mode: "sum", "avg" (over present inputs), "max".

    A kernel equal to its stride bins every input into its cell; any other one is a window like a
    convolution's. Where kernels run, cells that are windows are pooled as such. Windows without input
    give 0.  target: the output map, None for the layer's own.
    Raises: FeatureShapeError, FeatureTypeError, TensorDeviceError, StrideError, KeyStateError.
    """
    check_aligned(features, registry.grid(in_key), f"Minkowski{mode.capitalize()}Pooling")
    if not spec.cells or cells_are_windows(registry, in_key, spec, target):
        out_key, kmap = registry.layer_map(in_key, spec, target)
        if mode == "max":
            return window_max(features, kmap), out_key
        return pool(features, kmap, mode), out_key
    out_key = registry.output_key(in_key, spec) if target is None else target
    matrix = cell_matrix(registry, in_key, out_key)
    return pool_pairs(features, matrix, mode), out_key


def cells_are_windows(registry: MapRegistry, in_key: Key, spec: KernelSpec, target: Key | None) -> bool:
    """Whether the cells of a pool are as well the windows of its offsets: an even size, no dilation, coordinates that
    are multiples of their strides, and no target of another stride, whose cells are larger or smaller. Kernels build
    the maps of windows without knowing how many rows there are."""
    grids = [registry.grid(key) for key in (in_key, target) if key is not None]
    return (
        len(spec.region) <= LARGEST_WINDOW
        and spec.region is cell_region(spec.kernel_size)
        and all(grid.unit == grid.stride for grid in grids)
        and (target is None or grids[1].stride == tuple(map(operator.mul, grids[0].stride, spec.kernel_size)))
        and grids[0].own_view().kernel_target() is not None
    )


def transposed_pooling(
    registry: MapRegistry, features: torch.Tensor, mode: str, in_key: Key, spec: KernelSpec, target: Key | None = None
) -> Pooled:
    """Sum ("sum") or mean ("avg") of the contributing parents at every finer coordinate, as
    `local_pooling`; a kernel equal to its stride copies the parent."""
    check_aligned(features, registry.grid(in_key), "MinkowskiPoolingTranspose")
    if not spec.cells:
        out_key, kmap = registry.layer_map(in_key, spec, target)
        return pool(features, kmap, mode), out_key
    out_key = registry.output_key(in_key, spec) if target is None else target
    return cell_matrix(registry, out_key, in_key).transposed().multiply(features), out_key


def pool_items(features: torch.Tensor, rows: torch.Tensor, n_items: int, mode: str) -> torch.Tensor:
    """Reduce the rows of every item: [n_items, C]; an item without rows gives 0."""
    if n_items == 0:
        return features[:0].clone()
    return global_pool(features, rows, n_items, mode)


def global_pooling(registry: MapRegistry, features: torch.Tensor, mode: str, in_key: Key) -> Pooled:
    """Pool every batch item: rows by ascending batch index, and the key of the origin map.

    in_key: of a map; or of a field, where no map of that key has as many rows as the features.
    Raises: FeatureShapeError, FeatureTypeError, TensorDeviceError, KeyStateError.
    """
    glob = origin(registry)
    grid, field = registry.grids.get(in_key), registry.fields.get(in_key)
    if field is not None and (grid is None or grid.n_rows != features.shape[0]):
        check_features(features, len(field.coords), field.coords.device, "global pooling")
        rows = field_items(registry, in_key, glob)
    else:
        check_aligned(features, registry.grid(in_key), "global pooling")
        rows = batch_rows(registry, in_key, glob)
    return pool_items(features, rows, registry.grid(glob).n_rows, mode), glob
