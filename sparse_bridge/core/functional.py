"""Sparse convolution on plain tensors: the API for new code that needs no framework.

    from sparse_bridge.core import functional as sparse

    # coords int32 [N, 1 + D], x [N, C_in], weight [27, C_in, C_out]
    voxels = sparse.coordinate_map(coords, spatial_shape=(41, 1600, 1408), batch_size=2)
    same = sparse.submanifold(voxels, sparse.kernel_offsets((3, 3, 3)))
    x = sparse.conv(x, weight, bias, same)
    coarse, down = sparse.strided(voxels, sparse.kernel_offsets((2, 2, 2), padding=0), stride=2)
    y = sparse.conv(x, down_weight, None, down)  # rows of coarse.coords
    z = sparse.conv(y, up_weight, None, sparse.inverse(down))  # rows of voxels.coords again

One convention serves every layer: y[u] = sum over v of x[stride * u + offset[v]] @ weight[v] over
the active inputs. Kernel maps are geometry only: build one per coordinate set and share it between
layers, steps and dtypes. Gradients reach features, weight and bias; coordinates have none.
`SPARSE_BRIDGE_DATAFLOW` picks the way of computing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Sized

import torch

from ..errors import CoordinateError, DataTypeError, DeviceError, GeometryError, ShapeError
from .arguments import expect, expect_count, expect_tensors
from .compile.entries import in_graphs
from .conv import convolution
from .conv.epilogue import Norm
from .device.no_double_backward import refuse_wrapped
from .geometry.boxes import Box
from .geometry.offsets import Offsets, box_offsets
from .geometry.sparse_data import check_bounds
from .maps import map_builder
from .maps.coordinate_map import CoordinateMap
from .maps.kernel_map import KernelMap
from .ops import pool as pools
from .ops.relational import RelationMap, relation_map, relational_conv
from .ops.relational_layer import RelationalConv

__all__ = [
    "Box",
    "CoordinateMap",
    "KernelMap",
    "Norm",
    "Offsets",
    "RelationMap",
    "RelationalConv",
    "between",
    "conv",
    "conv_shape",
    "coordinate_map",
    "generative",
    "global_pool",
    "inverse",
    "kernel_map",
    "kernel_offsets",
    "pool",
    "relation_map",
    "relational_conv",
    "strided",
    "submanifold",
]

Ints = int | Sequence[int]

conv = in_graphs(convolution.conv)
pool, global_pool = in_graphs(pools.pool), in_graphs(pools.global_pool)


def _per_axis(value: Ints, dimension: int, name: str, least: int | None) -> tuple[int, ...]:
    try:
        if isinstance(value, Iterable):
            numbers = tuple(operator.index(number) for number in value)
        else:
            numbers = (operator.index(value),) * dimension
    except TypeError:
        raise GeometryError(f"{name} is {value!r}; expected integers.") from None
    if len(numbers) != dimension:
        raise GeometryError(f"{name} is {list(numbers)}; expected one number or {dimension}, one per axis.")
    if least is not None and min(numbers) < least:
        raise GeometryError(f"{name} is {list(numbers)}; every value must be at least {least}.")
    return numbers


def _dimension(name: str, sizes: Sequence[int]) -> int:
    if not isinstance(sizes, Sized) or not len(sizes):
        raise GeometryError(f"{name} is {sizes!r}; expected one number per axis.")
    return len(sizes)


@in_graphs
def coordinate_map(
    coords: torch.Tensor,
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    *,
    outside: str = "error",
) -> CoordinateMap:
    """A coordinate map over the rows of `coords`.

    Args:
        coords: int32 [N, 1 + D], batch index first, any order. Equal coordinates are allowed, see
            the builders.
        spatial_shape: coordinates lie in 0 <= c < spatial_shape[axis], at most 2^62 cells in all.
            None: the bounds of the data, any sign and size.
        batch_size: batch indices lie in 0 <= b < batch_size. None: the largest one there plus 1.
        outside: "error" raises for a row out of bounds; "ignore" keeps it as a dead row that meets
            no other row.

    Returns: the map. It waits for the device once to see the bounds; not with "ignore" and both
        bounds given.
    Raises: ShapeError, DataTypeError, DeviceError, GeometryError (a shape without cells),
        CoordinateError (names axis, value and limit), OverflowLimitError.
    """
    expect_tensors("coordinate_map", coords=coords)
    if coords.ndim != 2 or coords.shape[1] < 2:
        raise ShapeError(f"coordinates have shape {list(coords.shape)}; expected [N, 1 + D], batch index first.")
    if coords.dtype != torch.int32:
        raise DataTypeError(f"coordinates are {coords.dtype}; expected torch.int32 (use .int()).")
    if coords.is_meta:
        raise DeviceError("coordinates are on the meta device; a map needs their values.")
    if outside not in ("error", "ignore"):
        raise CoordinateError(f"outside={outside!r}; expected 'error' or 'ignore'.")
    refuse_wrapped(coords)
    dimension = coords.shape[1] - 1
    if spatial_shape is not None:
        spatial_shape = _per_axis(spatial_shape, dimension, "spatial_shape", 1)
    if batch_size is not None:
        expect_count("batch_size", batch_size)
    low, high = [0] * (1 + dimension), [-1] + [0] * dimension
    bounds_known = spatial_shape is not None and batch_size is not None
    if len(coords) and not (bounds_known and outside == "ignore"):
        low, high = (bound.tolist() for bound in coords.aminmax(dim=0))
    if outside == "error":
        check_bounds(low, high, spatial_shape, batch_size, "Drop such rows, or pass outside='ignore'.")
    batches = high[0] + 1 if batch_size is None else batch_size
    if spatial_shape is None:
        size = (batches, *(h - lo + 1 for lo, h in zip(low[1:], high[1:], strict=True)))
        return CoordinateMap(coords, Box.spanning((0, *low[1:]), size))
    return CoordinateMap(coords, Box.grid(max(0, batches), spatial_shape))


@in_graphs
def kernel_offsets(kernel_size: Sequence[int], *, dilation: Ints = 1, padding: Ints | None = None) -> Offsets:
    """Offsets of a box kernel, row-major: the r-th of an axis lies at r * dilation - padding.

    Args:
        kernel_size: offsets per axis, D numbers of at least 1.
        dilation: distance of neighbouring offsets.
        padding: None centres the kernel at offset k // 2; a dense layer's padding makes `strided`
            match that layer.

    Other kernels (crosses, holes, any order): `Offsets.of([[0, 0], [0, 1], ...])`, with matrix v
    of the weight at offset v.
    Raises: GeometryError, OverflowLimitError.
    """
    kernel = _per_axis(kernel_size, _dimension("kernel_size", kernel_size), "kernel_size", 1)
    steps = _per_axis(dilation, len(kernel), "dilation", 1)
    if padding is None:
        origin = tuple(k // 2 * d for k, d in zip(kernel, steps, strict=True))
    else:
        origin = _per_axis(padding, len(kernel), "padding", None)
    return box_offsets(kernel, steps, origin)


def conv_shape(
    spatial_shape: Sequence[int], kernel_size: Sequence[int], *, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1
) -> tuple[int, ...]:
    """Grid of a dense convolution: floor((I + 2 p - d (k - 1) - 1) / stride) + 1 per axis.

    Raises: GeometryError when an axis would hold no cell.
    """
    dimension = _dimension("spatial_shape", spatial_shape)
    per_axis = zip(
        spatial_shape,
        _per_axis(kernel_size, dimension, "kernel_size", 1),
        _per_axis(stride, dimension, "stride", 1),
        _per_axis(padding, dimension, "padding", None),
        _per_axis(dilation, dimension, "dilation", 1),
        strict=True,
    )
    shape = tuple((extent + 2 * p - d * (k - 1) - 1) // s + 1 for extent, k, s, p, d in per_axis)
    if min(shape) < 1:
        raise GeometryError(
            f"kernel {list(kernel_size)} on a grid of {list(spatial_shape)} gives {list(shape)}; "
            "every axis needs at least one cell. Use a larger grid, less dilation or more padding."
        )
    return shape


@in_graphs
def submanifold(cmap: CoordinateMap, offsets: Offsets) -> KernelMap:
    """Kernel map with the same rows in and out: y[r] gathers the rows at coordinate(r) + offset.

    The zero offset joins every row to itself, dead rows too. Of equal coordinates a look-up finds
    the first row.
    Raises: GeometryError when kernel and map differ in dimension.
    """
    expect(CoordinateMap, cmap=cmap)
    expect(Offsets, offsets=offsets)
    return map_builder.submanifold(cmap, offsets)


@in_graphs
def strided(
    cmap: CoordinateMap, offsets: Offsets, stride: Ints = 1, out_shape: Sequence[int] | None = None
) -> tuple[CoordinateMap, KernelMap]:
    """Coarser coordinates and the map to them: y[u] gathers x[stride * u + offset].

    Args:
        out_shape: only outputs 0 <= u < out_shape, as a dense layer computes (`conv_shape`). None:
            every u that reaches an input, whatever its sign.

    Returns: (output map, kernel map). Outputs are ordered by the first input row that reaches each,
        then by offset; equal input coordinates are summed. A plain convolution is stride 1; a pool
        takes the same map.
    Raises: GeometryError (dimensions, stride below 1, an empty out_shape), OverflowLimitError.
    """
    _same_dimension(cmap, offsets)
    steps = _per_axis(stride, cmap.box.dimension, "stride", 1)
    extents = []
    for axis, s in enumerate(steps):
        low, least, most = _span(cmap, offsets, axis)
        high = low + cmap.box.size[axis + 1] - 1
        extents.append((-(-(low - most) // s), (high - least) // s))
    return map_builder.strided(cmap, offsets, steps, _out_box(cmap, extents, out_shape))


@in_graphs
def generative(
    cmap: CoordinateMap, offsets: Offsets, stride: Ints = 1, out_shape: Sequence[int] | None = None
) -> tuple[CoordinateMap, KernelMap]:
    """New, finer coordinates: every stride * c + offset of an input c, which adds x[c] @ w[offset].

    The transposed convolution that makes its own outputs. Arguments, order, equal coordinates and
    errors as in `strided`.
    """
    _same_dimension(cmap, offsets)
    steps = _per_axis(stride, cmap.box.dimension, "stride", 1)
    extents = []
    for axis, s in enumerate(steps):
        low, least, most = _span(cmap, offsets, axis)
        high = low + cmap.box.size[axis + 1] - 1
        extents.append((low * s + least, high * s + most))
    return map_builder.generative(cmap, offsets, steps, _out_box(cmap, extents, out_shape))


def _same_dimension(cmap: CoordinateMap, offsets: Offsets) -> None:
    expect(CoordinateMap, cmap=cmap)
    expect(Offsets, offsets=offsets)
    if offsets.dimension != cmap.box.dimension:
        raise GeometryError(
            f"a {offsets.dimension}-dimensional kernel on {cmap.box.dimension}-dimensional "
            "coordinates; both must agree."
        )


def _span(cmap: CoordinateMap, offsets: Offsets, axis: int) -> tuple[int, int, int]:
    """(lowest coordinate, smallest offset, largest offset) along `axis`."""
    along = [offset[axis] for offset in offsets.values]
    return cmap.box.lo[axis + 1], min(along), max(along)


def _out_box(cmap: CoordinateMap, extents: list[tuple[int, int]], out_shape: Sequence[int] | None) -> Box:
    if out_shape is not None:
        shape = _per_axis(out_shape, cmap.box.dimension, "out_shape", 1)
        extents = [(0, extent - 1) for extent in shape]
    lo = (cmap.box.lo[0], *(first for first, _ in extents))
    size = (cmap.box.size[0], *(max(0, last - first + 1) for first, last in extents))
    return Box.of(lo, size) if out_shape is not None else Box.spanning(lo, size)


@in_graphs
def inverse(kmap: KernelMap) -> KernelMap:
    """The same pairs with input and output exchanged: back to the coordinates of an earlier layer.

    Nothing is looked up or copied (equal coordinates under a submanifold map apart).
    """
    expect(KernelMap, kmap=kmap)
    return kmap.transposed()


@in_graphs
def between(x_map: CoordinateMap, y_map: CoordinateMap, offsets: Offsets, stride: Ints = 1) -> KernelMap:
    """Kernel map between two coordinate sets that exist: y[u] gathers x[stride * u + offset].

    Equal coordinates of x are summed, those of y copied. Output rows that meet no input come out as
    the bias alone.
    Raises: GeometryError, ShapeError (maps of two dimensions), DeviceError.
    """
    expect(CoordinateMap, x_map=x_map, y_map=y_map)
    expect(Offsets, offsets=offsets)
    return map_builder.between(x_map, y_map, offsets, _per_axis(stride, x_map.box.dimension, "stride", 1))


@in_graphs
def kernel_map(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], n_in: int, n_out: int) -> KernelMap:
    """A kernel map from explicit (input rows, output rows) lists, integer [P_v], one per offset.

    Raises:
        GeometryError: no offsets.
        ShapeError: lists of another rank, or of different lengths.
        DataTypeError: rows that are no integers.
        DeviceError: lists on different devices.
        CoordinateError: a row outside n_in or n_out.
    """
    if not isinstance(pairs, Sequence) or not all(map(_is_pair, pairs)):
        raise DataTypeError(
            f"pairs is {type(pairs).__name__}; expected a list of (input rows, output rows), one for each offset."
        )
    expect_count("n_in", n_in)
    expect_count("n_out", n_out)
    return map_builder.from_pairs(pairs, n_in, n_out)


def _is_pair(rows: object) -> bool:
    if isinstance(rows, torch.Tensor):
        return rows.ndim == 2 and len(rows) == 2
    return isinstance(rows, Sequence) and len(rows) == 2
