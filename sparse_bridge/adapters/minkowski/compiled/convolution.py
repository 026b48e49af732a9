"""Convolutions in a graph, and the maps of all layers with a kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ....core.compile import coordinates, handles, products
from ....core.compile.coordinates import BuilderResult, Sites, Traced
from ....core.compile.library import define
from ....core.conv.epilogue import Epilogue
from ....core.conv.plan import ConvForm
from ....core.device.torch_compat import allows_tf32
from ....core.maps.kernel_map import KernelMap
from ....core.ops.row_matrix import RowMatrix
from ....errors import ContractError
from ..geometry import KernelSpec, Region, kernel_region, kernel_spec
from ..grid import Key
from ..maps import MapRegistry
from ..pool import cell_matrix
from ..strides import product
from ..upstream.enums import RegionType
from ..upstream.keys import CoordinateMapKey
from ..weights import check_features, check_weight
from .registered_maps import (
    SCHEMA,
    GraphMaps,
    flatten,
    graph_of,
    map_of_sites,
    registered_map,
    together,
    traced_sites,
    wrap,
)

ops: Any = torch.ops.sparse_bridge
_BUILDER = "minkowski"


class Kernel:
    """The kernel of a layer while a program is traced. cells: a pool that bins rows into cells."""

    def __init__(self, module: Any, pools: bool) -> None:
        generator = module.kernel_generator
        self.size, self.stride = tuple(generator.kernel_size), tuple(generator.kernel_stride)
        self.transposed = bool(module.is_transpose)
        self.expand = bool(generator.expand_coordinates)
        self.cells = pools and self.size == self.stride
        self.points = _points(
            int(generator.region_type), self.size, tuple(generator.kernel_dilation), generator._listed
        )

    @property
    def n_offsets(self) -> int:
        return len(self.points) // len(self.stride)

    def numbers(self, key: Key) -> list[int]:
        """A request for the map of this kernel on the map `key`, see `_asked_for`."""
        flags = len(self.stride), int(self.transposed), int(self.expand), int(self.cells)
        return [*flags, *key[0], *self.size, *self.stride, *self.points]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _points(region: int, size: tuple[int, ...], dilation: tuple[int, ...], custom: Any) -> tuple[int, ...]:
    """The offsets of a kernel, one after the other."""
    kernel = kernel_region(RegionType(region), size, dilation, custom)
    return tuple(c for point in kernel.points for c in point)


@functools.cache
def _asked_for(numbers: tuple[int, ...]) -> tuple[tuple[int, ...], KernelSpec, bool]:
    """(tensor stride, kernel, whether it pools cells) of a request."""
    n_axes, transposed, expand, cells = numbers[:4]
    stride, size, step = (numbers[4 + n_axes * i : 4 + n_axes * (i + 1)] for i in range(3))
    flat_points = numbers[4 + 3 * n_axes :]
    points = tuple(flat_points[i : i + n_axes] for i in range(0, len(flat_points), n_axes))
    spec = kernel_spec(Region.of(points), size, step, bool(expand), bool(transposed))
    return stride, spec, bool(cells)


def _between(
    registry: MapRegistry, key: Key, spec: KernelSpec, cells: bool, out: Key | None
) -> tuple[Key, KernelMap | RowMatrix]:
    """Where a layer writes, and the map to there. out: None for the layer's own rule."""
    if not cells:
        return registry.layer_map(key, spec, out)
    out = registry.output_key(key, spec) if out is None else out
    if spec.transposed:
        return out, cell_matrix(registry, out, key).transposed()
    return out, cell_matrix(registry, key, out)


def _build(sites: Sites, numbers: Sequence[int]) -> BuilderResult:
    stride, spec, cells = _asked_for(tuple(numbers))
    x = map_of_sites(sites, stride)
    out, kmap = _between(x.registry, x.key, spec, cells, None)
    return BuilderResult(kmap) if out == x.key else BuilderResult(kmap, wrap(x.with_key(out)))


coordinates.register(_BUILDER, _build)


def _relation(
    coords: torch.Tensor,
    handle: torch.Tensor,
    then: int,
    now: int,
    stride: Sequence[int],
    out_coords: torch.Tensor,
    out_handle: torch.Tensor,
    out_then: int,
    out_now: int,
    out_stride: Sequence[int],
    numbers: Sequence[int],
) -> torch.Tensor:
    x = registered_map(coords, handle, then, now, stride)
    y = registered_map(out_coords, out_handle, out_then, out_now, out_stride)
    _, spec, cells = _asked_for(tuple(numbers))
    return handles.make(_between(together([x, y]), x.key, spec, cells, y.key)[1])


define(
    "minkowski_relation",
    f"({SCHEMA}, Tensor out_coords, Tensor out_handle, SymInt out_then, SymInt out_now, "
    "int[] out_stride, int[] numbers) -> Tensor",
    _relation,
    lambda *ignored: handles.like(),
)


def _output_key(graph: GraphMaps, key: Key, kernel: Kernel) -> Key:
    """Where a layer writes, as `MapRegistry.output_key`."""
    stride, name = key
    strided = any(s > 1 for s in kernel.stride)
    if not kernel.expand and not strided:
        return key
    if kernel.transposed:
        if any(t % s for t, s in zip(stride, kernel.stride, strict=True)):
            raise ContractError(
                f"a transposed layer of stride {list(kernel.stride)} on tensor stride "
                f"{list(stride)}; the stride must divide it."
            )
        finer = tuple(t // s for t, s in zip(stride, kernel.stride, strict=True))
        return graph.free_key(finer) if kernel.expand else (finer, "")
    coarser = product(stride, kernel.stride)
    if kernel.expand:
        return graph.free_key(coarser)
    memo = key, kernel.stride
    if memo not in graph.strided:
        out_key = coarser, name
        graph.strided[memo] = graph.free_key(*out_key) if out_key in graph.pruned else out_key
    return graph.strided[memo]


def graph_output_key(module: Any, x: Any, coordinates: Any) -> Key | None:
    """The map on which a layer with a kernel writes; None: it cannot be an operator.

    coordinates: the layer's argument: a SparseTensor or a key of the graph, or None. Layers on
    tensors that were pooled globally are none, nor are those over several maps of the user's
    manager, nor those that would write to a map of it.
    """
    registry, key = x._manager._manager, x.coordinate_map_key._key
    if 0 in key[0] or traced_sites(registry, key) is None:
        return None
    graph = graph_of(registry)
    if coordinates is not None:
        own = getattr(coordinates, "coordinate_map_key", coordinates)
        if not isinstance(own, CoordinateMapKey) or own._key not in graph.sites:
            return None
        if getattr(coordinates, "_manager", x._manager) is not x._manager:
            return None
        return own._key
    out_key = _output_key(graph, key, Kernel(module, False))
    return None if out_key not in graph.sites and out_key in registry.grids else out_key


def layer_map(x: Any, kernel: Kernel, out_key: Key) -> tuple[torch.Tensor, Traced]:
    """A handle of the map of a layer, and the coordinates where it writes. Layers that share a map
    share one call of an operator."""
    key = x.coordinate_map_key._key
    graph = graph_of(x._manager._manager)
    sites, numbers = graph.sites[key], kernel.numbers(key)
    out_sites, memo = graph.sites.get(out_key), (key, out_key, tuple(numbers))
    if out_sites is None:
        handle, out_sites = sites.new_map(_BUILDER, numbers, torch.is_grad_enabled())
        graph.sites[out_key] = out_sites
        graph.maps[memo] = handle
        return handle, out_sites
    if memo not in graph.maps:
        graph.maps[memo] = (
            sites.map(_BUILDER, numbers)
            if out_key == key
            else ops.minkowski_relation(*flatten(sites, key), *flatten(out_sites, out_key), numbers)
        )
    return graph.maps[memo], out_sites


def convolved(module: Any, x: Any, kernel: torch.Tensor, bias: torch.Tensor | None, out_key: Key) -> torch.Tensor:
    """The features of a convolution with a map, at the coordinates of `out_key` (of `graph_output_key`)."""
    region, layer_name = Kernel(module, False), type(module).__name__
    handle, out = layer_map(x, region, out_key)
    sites = graph_of(x._manager._manager).sites[x.coordinate_map_key._key]
    check_features(x._F, sites.coords.shape[0], sites.coords.device, layer_name)
    check_weight(x._F, kernel, kernel.shape[-2], region.n_offsets, layer_name)
    tf32 = x._F.dtype is torch.float32 and allows_tf32()
    form = ConvForm(precision="tf32" if tf32 else "ieee")
    if kernel.dim() == 2:
        kernel = kernel.unsqueeze(0)
    flat = None if bias is None else bias.view(-1)
    return products.conv(x._F, kernel, Epilogue(flat), handle, out.coords.shape[0], form)
