"""FlexGEMM's functions while a program is traced: by `torch.compile`, or by `torch.export`.

Convolutions become operators for maps and products, sampling and codes one operator each. A graph
has neighbour caches of its own; a layer that gets one from outside runs between two graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.compile import codes as codes  # registers operators
from ...core.compile import coordinates, handles, products
from ...core.compile.coordinates import BuilderResult, Sites
from ...core.compile.row_functions import row_function
from ...core.conv.epilogue import Epilogue
from ...core.conv.plan import ConvForm
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import store_of
from ...core.traced.graphs import outside as outside
from . import sampling
from .arguments import kernel_of
from .caches import NeighborCache
from .geometry import Strided, check_rows, triple
from .maps import output_coordinates, strided_cache, submanifold_cache

ops: Any = torch.ops.sparse_bridge
_BUILDER = "flex_gemm"
_SUBMANIFOLD, _STRIDED = 0, 1
Layer = tuple[Any, ...]


class GraphCache:
    """A neighbour cache that a graph made. Outside of graphs it is read like every other.

    handle: of the kernel map.  coords: of the output, where the layer made some.
    """

    def __init__(self, handle: torch.Tensor, coords: torch.Tensor | None) -> None:
        self.handle, self.coords = handle, coords
        self.cache: NeighborCache | None = None

    def engine_cache(self) -> NeighborCache:
        if self.cache is None:
            self.cache = NeighborCache.of(handles.value_of(self.handle, KernelMap))
        return self.cache

    def __reduce__(self) -> Any:
        """Copies and pickles know of no graph: they are the cache itself."""
        return copy.copy, (self.engine_cache(),)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.engine_cache(), name)


def build(sites: Sites, numbers: Sequence[int]) -> BuilderResult:
    """The map of a layer: numbers as the functions below put them."""
    layer_type, *parameters = numbers
    kernel, *steps = (tuple(parameters[first : first + 3]) for first in range(0, 12, 3))
    cache: Any
    if layer_type == _SUBMANIFOLD:
        layer: Any = kernel, steps[0]
        cache = submanifold_cache(sites.coords, parameters[6:] or None, *layer)
        return BuilderResult(cache._kmap)
    layer, shape = Strided.of(kernel, *steps), parameters[12:]
    out_coords = output_coordinates(sites.coords, shape, layer)
    cache = strided_cache(sites.coords, out_coords, shape, layer)
    return BuilderResult(cache._kmap, Sites(out_coords, store_of(out_coords)))


coordinates.register(_BUILDER, build)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(function: Callable[[], bool]) -> bool:
    """What it answers while the graph is made."""
    return function()


def _served(cache: Any) -> bool:
    """Whether a layer becomes operators: not with a cache that was made outside of a graph."""
    return cache is None or isinstance(cache, GraphCache)


def submanifold_conv(
    eager: Callable[..., Any], as_made: Callable[[], bool], form: ConvForm, layer: Layer
) -> tuple[torch.Tensor, Any]:
    """`eager`, which is `sparse_submanifold_conv3d`, in a graph, or between two graphs.

    as_made: whether nobody replaced its parts.  layer: its arguments.
    """
    feats, coords, shape, weight, bias, cache, dilation = layer
    if not (_served(cache) and _constant(as_made)):
        return outside(eager, *layer)  # type: ignore[no-any-return]
    caller = "sparse_submanifold_conv3d"
    kernel = kernel_of(caller, feats, weight, bias)
    if cache is None:
        check_rows(feats, coords, caller)
        numbers = [_SUBMANIFOLD, *kernel, *triple(dilation, "dilation", 1)]
        numbers += () if shape is None else shape
        cache = GraphCache(coordinates.entered(coords).map(_BUILDER, numbers), None)
    return _multiplied(feats, cache, weight, bias, form), cache


def strided_conv(
    eager: Callable[..., Any], as_made: Callable[[], bool], form: ConvForm, layer: Strided, arguments: Layer
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """`eager`, which is `sparse_conv3d`, in a graph, or between two graphs: onto given coordinates.

    as_made: whether nobody replaced its parts.  arguments: up to `out_coords`.
    """
    feats, coords, shape, weight, bias, cache, out_coords = arguments
    if out_coords is not None or not (_served(cache) and _constant(as_made)):
        return outside(eager, *arguments, layer.stride, layer.padding, layer.dilation)  # type: ignore[no-any-return]
    check_rows(feats, coords, "sparse_conv3d")
    if cache is None:
        steps = (*layer.stride, *layer.padding, *layer.dilation)
        numbers = [_STRIDED, *layer.kernel, *steps, *shape]
        sites = coordinates.entered(coords)
        handle, out_sites = sites.new_map(_BUILDER, numbers, torch.is_grad_enabled())
        cache = GraphCache(handle, out_sites.coords)
    return _multiplied(feats, cache, weight, bias, form), cache.coords, cache


def _multiplied(
    feats: torch.Tensor, cache: GraphCache, weight: torch.Tensor, bias: torch.Tensor | None, form: ConvForm
) -> torch.Tensor:
    """`conv.multiply` in a graph."""
    rows = feats.shape[0] if cache.coords is None else cache.coords.shape[0]
    autocast = torch.is_autocast_enabled(feats.device.type)
    weight = weight.to(feats.dtype) if autocast else weight
    with torch.autocast(feats.device.type, enabled=False):
        return products.conv(feats, weight, Epilogue(bias), cache.handle, rows, form)


row_function(
    "flex_gemm_grid_sample",
    "Tensor coords, SymInt[] sizes, Tensor grid, str mode",
    sampling.sampled,
    lambda x, coords, sizes, grid, mode: x.new_empty((*grid.shape[:2], x.shape[1])),
)


def sampled(
    feats: torch.Tensor, coords: torch.Tensor, sizes: Sequence[int], grid: torch.Tensor, mode: str
) -> torch.Tensor:
    """`sampling.sampled` in a graph."""
    y: torch.Tensor = ops.flex_gemm_grid_sample(feats, coords, list(sizes), grid, mode)
    return y
