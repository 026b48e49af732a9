"""`core.functional` while a program is traced: maps and products of plain tensors as operators.

A graph makes maps of its own: `GraphMap` and `GraphKernelMap`. Functions that get maps which were
made outside run between two graphs, unless `sparse_bridge.compile.portable` has prepared those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ..conv.activations import activated
from ..conv.convolution import autocast_dtype
from ..conv.epilogue import Epilogue
from ..conv.plan import ConvForm
from ..geometry.offsets import Offsets
from ..maps.coordinate_map import CoordinateMap
from ..maps.kernel_map import KernelMap
from ..traced.graphs import outside as between_two_graphs
from . import functional_maps as functional_maps
from . import handles, products
from . import row_functions as row_functions  # registers operators
from .coordinates import least_rows
from .originals import functions

ops: Any = torch.ops.sparse_bridge


class _OfGraph:
    """What stands for an object of the engine in a graph. Outside it is read like that object.

    handle: of the object, int64 [1] on the CPU.
    """

    engine_class: type

    def __init__(self, handle: torch.Tensor) -> None:
        self.handle = handle

    def engine_object(self) -> Any:
        """The object. Raises LifecycleError where its handle is gone."""
        return handles.value_of(self.handle, self.engine_class)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.engine_object(), name)


class GraphMap(_OfGraph):
    """A `CoordinateMap` in a graph. coords: int32 [N, 1 + D]."""

    engine_class = CoordinateMap

    def __init__(self, handle: torch.Tensor, coords: torch.Tensor) -> None:
        super().__init__(handle)
        self.coords = coords

    @property
    def n_rows(self) -> int:
        """Rows of the coordinates, of any number in a graph."""
        return self.coords.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the coordinates are."""
        return self.coords.device


class GraphKernelMap(_OfGraph):
    """A `KernelMap` in a graph.  handle: int64 [1] on the CPU.  rows: of x and y.  backwards: it is the map of the
    handle with x and y exchanged."""

    engine_class = KernelMap

    def __init__(self, handle: torch.Tensor, rows: tuple[int, int], n_offsets: int, backwards: bool = False) -> None:
        super().__init__(handle)
        self.n_in, self.n_out = rows
        self.n_offsets, self.reversed = n_offsets, backwards

    def engine_object(self) -> Any:
        kmap = super().engine_object()
        return kmap.transposed() if self.reversed else kmap

    def transposed(self) -> GraphKernelMap:
        """The same pairs with x and y exchanged."""
        rows = self.n_out, self.n_in
        return GraphKernelMap(self.handle, rows, self.n_offsets, not self.reversed)


def portable(built: Any) -> Any:
    """A map of the engine in the form that graphs take, and the engine, too.

    built: a `CoordinateMap` or a `KernelMap`. Raises UnsupportedError for anything else.
    """
    if isinstance(built, CoordinateMap):
        return GraphMap(handles.make(built), built.coords)
    if isinstance(built, KernelMap):
        return GraphKernelMap(handles.make(built), (built.n_in, built.n_out), built.n_offsets)
    raise UnsupportedError(f"portable() got {built!r}; expected a CoordinateMap or a KernelMap.")


@torch.compiler.assume_constant_result
def _offsets(*form: Any) -> Offsets:
    kernel_size, dilation, padding = form
    offsets: Offsets = functions["kernel_offsets"](kernel_size, dilation=dilation, padding=padding)
    return offsets


def kernel_offsets(eager: Any, kernel_size: Any, *, dilation: Any = 1, padding: Any = None) -> Offsets:
    """`core.functional.kernel_offsets`, a constant of the graph. eager: that function, as everywhere here."""
    offsets: Offsets = _offsets(kernel_size, dilation, padding)
    return offsets


def _kernel(offsets: Offsets) -> tuple[list[int], int]:
    """Offsets row by row, and their dimension."""
    flat = [number for offset in offsets.values for number in offset]
    return flat, len(offsets.values[0])


def coordinate_map(
    eager: Any,
    coords: torch.Tensor,
    spatial_shape: Any = None,
    batch_size: int | None = None,
    *,
    outside: str = "error",
) -> GraphMap:
    """`core.functional.coordinate_map` of coords int32 [N, 1 + D] as an operator. Raises what that raises, as all
    operators here do when their graph runs."""
    handle = ops.coordinate_map(coords, _numbers(spatial_shape), batch_size, outside)
    return GraphMap(handle, coords)


def _numbers(sizes: Any) -> list[int] | None:
    return sizes if sizes is None else [sizes] if isinstance(sizes, int) else list(sizes)


def submanifold(eager: Any, cmap: Any, offsets: Offsets) -> Any:
    """`core.functional.submanifold` as an operator; between two graphs for a map that was made outside."""
    if not isinstance(cmap, GraphMap):
        return between_two_graphs(eager, cmap, offsets)
    handle = ops.submanifold_map(cmap.handle, *_kernel(offsets))
    return GraphKernelMap(handle, (cmap.n_rows, cmap.n_rows), len(offsets.values))


def _onto_new(builder: str, eager: Any, cmap: Any, offsets: Offsets, stride: Any = 1, out_shape: Any = None) -> Any:
    if not isinstance(cmap, GraphMap):
        return between_two_graphs(eager, cmap, offsets, stride, out_shape)
    least = least_rows(torch.is_grad_enabled())
    arguments = *_kernel(offsets), _numbers(stride), _numbers(out_shape)
    kmap, coords, handle = ops.expanded_map(cmap.coords, cmap.handle, *arguments, builder, least)
    rows = cmap.n_rows, coords.shape[0]
    return GraphMap(handle, coords), GraphKernelMap(kmap, rows, len(offsets.values))


strided = functools.partial(_onto_new, "strided")
generative = functools.partial(_onto_new, "generative")


def inverse(eager: Any, kmap: Any) -> Any:
    """`core.functional.inverse`, which takes no operator; between two graphs for a map that was made outside."""
    if not isinstance(kmap, GraphKernelMap):
        return between_two_graphs(eager, kmap)
    return kmap.transposed()


def between(eager: Any, x_map: Any, y_map: Any, offsets: Offsets, stride: Any = 1) -> Any:
    """`core.functional.between` as an operator; between two graphs for maps that were made outside."""
    if not (isinstance(x_map, GraphMap) and isinstance(y_map, GraphMap)):
        return between_two_graphs(eager, x_map, y_map, offsets, stride)
    handle = ops.map_between(x_map.handle, y_map.handle, *_kernel(offsets), _numbers(stride))
    return GraphKernelMap(handle, (x_map.n_rows, y_map.n_rows), len(offsets.values))


def kernel_map(eager: Any, pairs: Sequence[Any], n_in: int, n_out: int) -> GraphKernelMap:
    """`core.functional.kernel_map` of pairs (x rows, y rows) int [P] per offset, as an operator."""
    handle = ops.map_of_pairs([pair[0] for pair in pairs], [pair[1] for pair in pairs], n_in, n_out)
    return GraphKernelMap(handle, (n_in, n_out), len(pairs))


def conv(
    eager: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kmap: Any,
    *,
    layout: str = "vio",
    groups: int = 1,
    activation: str | None = None,
    alpha: float = 0.0,
    norm: Any = None,
    residual: torch.Tensor | None = None,
    allow_tf32: bool = False,
    fp16_accumulation: bool = False,
) -> torch.Tensor:
    """`core.functional.conv` of x [N_in, C_in] as an operator: [N_out, C_out] in x's dtype, or autocast's. Between two
    graphs for a map that was made outside."""
    if not isinstance(kmap, GraphKernelMap):
        result: torch.Tensor = between_two_graphs(
            eager,
            x,
            weight,
            bias,
            kmap,
            layout=layout,
            groups=groups,
            activation=activation,
            alpha=alpha,
            norm=norm,
            residual=residual,
            allow_tf32=allow_tf32,
            fp16_accumulation=fp16_accumulation,
        )
        return result
    half = fp16_accumulation and torch.float16 in (x.dtype, autocast_dtype(x.device))
    form = ConvForm(layout, groups, "half" if half else "tf32" if allow_tf32 else "ieee")
    end = Epilogue(bias, activation if residual is None else None, alpha, norm)
    y = products.conv(x, weight, end, kmap.handle, kmap.n_out, form, kmap.reversed)
    if residual is None:
        return y
    y = y + residual.to(y.dtype)
    return activated(y, activation, alpha)


def pool(eager: Any, x: torch.Tensor, kmap: Any, mode: str, floor: float = float("-inf")) -> Any:
    """`core.functional.pool` of x [N_in, C] as an operator: [N_out, C] in x's dtype. Between two graphs for a map that
    was made outside."""
    if not isinstance(kmap, GraphKernelMap):
        return between_two_graphs(eager, x, kmap, mode, floor)
    return ops.pool(x, kmap.n_out, kmap.handle, mode, floor, kmap.reversed)


def global_pool(eager: Any, x: torch.Tensor, batch: torch.Tensor, batch_size: int, mode: str) -> Any:
    """`core.functional.global_pool` of x [N, C] and batch int32 or int64 [N] as an operator: [batch_size, C] in x's
    dtype."""
    return ops.global_pool(x, batch, batch_size, mode)
