"""What `CoordinateManager` offers beyond the maps themselves."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch

from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.ops.row_matrix import RowMatrix
from ...core.traced import between_graphs
from ...errors import ContractError, CoordinateError
from .batches import has_items_of_one, origin
from .errors import KeyStateError
from .geometry import KernelSpec
from .grid import INT32, Grid, Key, integral
from .maps import MapRegistry, Stride
from .points import FieldMap, interpolation_matrix
from .pool import cell_matrix
from .strides import check_tensor_stride

Voxelized = tuple[Key, torch.Tensor | None, torch.Tensor]


@between_graphs
def insert_field(registry: MapRegistry, coords: torch.Tensor, stride: tuple[int, ...], name: str = "") -> Key:
    """Enter the coordinates [N, 1 + D] of points; the key of the field."""
    check_tensor_stride(stride)
    registry.use_device(coords.device)
    key = registry.free_key(stride, name, registry.fields)
    registry.fields[key] = FieldMap(coords, stride)
    return key


def over(registry: MapRegistry, key: Key, root: CoordinateMap) -> MapRegistry:
    """A registry that has the map `key` alone, with the coordinates `root` instead of its own."""
    grid = registry.grid(key)
    copied = Grid(None, grid.stride, grid.unit, (grid.lo, grid.hi), grid.source)
    copied.adopt(None, root)
    result = type(registry)(registry.dimension)
    result.use_device(root.device)
    result.grids[key] = copied
    result.whole = has_items_of_one(registry)
    return result


def join(registry: MapRegistry, root: Key, other: MapRegistry, key: Key, coords: torch.Tensor) -> Key:
    """Enter the map that layers made in `other` under `key`, here with these coordinates, as they
    would have made it of `root`; the key. A map that layers have made here since is it.

    Raises: CoordinateError where a coordinate left int32.
    """
    like, grid = other.grid(key), registry.grid(root)
    if like.source == "origin":
        return origin(registry)
    existing = registry.grids.get(key)
    if existing is not None and (existing.source == like.source == "strided" or existing.origin == (root, ref(like))):
        return key
    key = registry.free_key(*key)
    if like.source == "strided":  # cells of the root
        low = [c // s * s for c, s in zip(grid.lo[1:], like.stride, strict=True)]
        high = (c // s * s for c, s in zip(grid.hi[1:], like.stride, strict=True))
        if min(low) < INT32.min:
            if bool((coords[:, 1:] > coords.new_tensor(grid.hi[1:])).any()):
                raise CoordinateError(
                    f"coordinates down to {min(low)} on tensor stride {list(like.stride)} leave 32-bit integers; shift "
                    "the input's coordinates, or use a smaller stride."
                )
            low = [max(c, INT32.min) for c in low]
        bounds = (grid.lo[0], *low), (grid.hi[0], *high)
        joined = Grid(coords, like.stride, like.unit, bounds, like.source)
    else:
        joined = Grid.around(coords, like.stride, like.source)
    joined.origin = root, ref(like)
    registry.grids[key] = joined
    return key


def enter_levels(
    registry: MapRegistry, other: MapRegistry, stride: Stride, cut: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Enter the maps that layers made in `other` on the way to a tensor stride, and that later layers look for: a
    transposed layer the strided ones, and any the expanded ones. Where one of them is an output, too, `join` finds it.

    other: made by `over`.  cut: makes coordinates there those for `registry`.
    """
    root = next(iter(other.grids))
    for key, grid in other.grids.items():
        if key == root or key[1] or key in registry.grids:
            continue
        finer = any(fine <= step for fine, step in zip(key[0], stride, strict=True))
        if grid.source == "expanded" or (finer and grid.source == "strided"):
            join(registry, root, other, key, grid.absolute(cut(grid.own_view().coords)))


@between_graphs
def voxelize(registry: MapRegistry, field_key: Key, stride: tuple[int, ...], name: str = "") -> Voxelized:
    """A new map of the voxels that hold the points of a field: its key, the first point of every
    voxel (None if no two points share one), the voxel of every point; int64.

    Raises: CoordinateError where a voxel leaves 32-bit integers, and what `check_tensor_stride` does.
    """
    check_tensor_stride(stride)
    field = registry.field(field_key)
    key, first, inverse = registry.insert(field.cells(stride), stride, name, aligned=True)
    registry.grid(key).field = field_key
    if inverse is None:
        inverse = torch.arange(len(field.coords), device=field.coords.device)
    field.rows.put(key, inverse, inverse.device)
    return key, first, inverse


@between_graphs
def point_rows(registry: MapRegistry, field_key: Key, key: Key) -> torch.Tensor:
    """int64 [N]: the row of `key` whose voxel holds each point of the field, -1 for none."""
    field = registry.field(field_key)
    rows = field.rows.get(key)
    if rows is None:
        grid = registry.grid(key)
        rows = grid.rows_of(integral(field.cells(grid.stride)))
        field.rows.put(key, rows, rows.device)
    return rows


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


@between_graphs
def slice_matrix(registry: MapRegistry, field_key: Key, key: Key) -> RowMatrix:
    """From the rows of `key` to the points of the field, each of which must have a voxel.

    Raises: CoordinateError.
    """
    matrix = registry.slices.get((field_key, key))
    if matrix is None:
        rows = every_point_row(registry, field_key, key)
        points = torch.arange(len(rows), device=rows.device)
        matrix = RowMatrix(points, rows, None, len(rows), registry.grid(key).n_rows)
        registry.slices.put((field_key, key), matrix, rows.device)
    return matrix


@between_graphs
def stride_pairs(registry: MapRegistry, in_key: Key, out_key: Key) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of `in_key`, the rows of `out_key` whose cell holds them), int64."""
    parents = registry.parent_rows(in_key, out_key)
    rows = (parents >= 0).nonzero().squeeze(1)
    return rows, parents.index_select(0, rows)


def kernel_pairs(kmap: KernelMap) -> dict[int, torch.Tensor]:
    """{offset: int32 [2, n]}, row 0 input and row 1 output rows, ascending in the output row;
    offsets without pairs are absent."""
    pairs = {}
    for v in range(kmap.n_offsets):
        in_rows, out_rows = kmap.pair_list(v)
        if len(in_rows):
            order = torch.sort(out_rows, stable=True).indices
            pairs[v] = torch.stack([in_rows[order], out_rows[order]]).int()
    return pairs


@between_graphs
def kernel_map_pairs(
    registry: MapRegistry, in_key: Key, out_key: Key, spec: KernelSpec, pool: bool
) -> dict[int, torch.Tensor]:
    """{offset: int32 [2, n]} (input rows, output rows); see `kernel_pairs`."""
    if not (pool and spec.cells):
        return kernel_pairs(registry.layer_map(in_key, spec, out_key).kmap)
    fine, coarse = (out_key, in_key) if spec.transposed else (in_key, out_key)
    matrix = cell_matrix(registry, fine, coarse)
    if not len(matrix.in_rows):
        return {}
    pair = (matrix.in_rows, matrix.out_rows)
    return {0: torch.stack(pair[::-1] if spec.transposed else pair).int()}


def union_pairs(registry: MapRegistry, keys: list[Key], out_is_set: bool) -> tuple[Key, list[torch.Tensor]]:
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


@between_graphs
def interpolation_pairs(registry: MapRegistry, key: Key, samples: torch.Tensor) -> list[torch.Tensor]:
    """[input rows int32, sample rows int32, weights] of the corners that exist, by sample."""
    matrix = interpolation_matrix(registry.grid(key), samples)
    assert matrix.weights is not None
    return [matrix.in_rows.int(), matrix.out_rows.int(), matrix.weights.to(samples.dtype)]
