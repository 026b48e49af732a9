"""Convolutions of MinkowskiEngine while a program is traced: by `torch.compile` or `torch.export`.

Keys are worked out while the program is traced, as a manager would give them; coordinates and maps
are operators. A graph has managers of its own, which it fills from the coordinates that its first
layer sees; the user's manager holds, in `traced`, what the graph knows of the maps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.compile import coordinates, handles, products
from ...core.compile import row_functions as row_functions  # registers operators
from ...core.compile.coordinates import Made, Sites, Traced
from ...core.compile.library import define
from ...core.conv.epilogue import Epilogue
from ...core.conv.plan import ConvForm
from ...core.maps.map_cache import MapStore
from ...errors import ContractError, ShapeError, UnsupportedError
from ..traced import outside as outside
from .geometry import KernelSpec, Region, kernel_region, kernel_spec
from .grid import Key
from .maps import MapRegistry
from .upstream.enums import RegionType, SparseTensorQuantizationMode
from .weights import check_features, check_weight

_BUILDER = "minkowski"


class _Place(NamedTuple):
    """Where coordinates stand in a manager of a graph."""

    registry: MapRegistry
    key: Key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _points(
    region: int, size: tuple[int, ...], dilation: tuple[int, ...], custom: Any
) -> tuple[int, ...]:
    """The offsets of a kernel, one after the other."""
    found = kernel_region(RegionType(region), size, dilation, custom)
    return tuple(c for point in found.points for c in point)


@functools.cache
def _spec(numbers: tuple[int, ...]) -> tuple[tuple[int, ...], KernelSpec]:
    """(tensor stride, kernel) of a request."""
    n_axes, transposed, expand = numbers[:3]
    stride, size, step = (numbers[3 + n_axes * i : 3 + n_axes * (i + 1)] for i in range(3))
    rest = numbers[3 + 3 * n_axes :]
    points = tuple(rest[i : i + n_axes] for i in range(0, len(rest), n_axes))
    return stride, kernel_spec(Region.of(points), size, step, bool(expand), bool(transposed))


def _build(sites: Sites, numbers: Sequence[int]) -> Made:
    stride, spec = _spec(tuple(numbers))
    if sites.more is None:
        registry = MapRegistry(len(stride))
        key, first, _ = registry.insert(sites.coords, stride)
        if first is not None:
            raise ContractError("coordinates of a compiled layer repeat; they must be distinct.")
        sites.more = _Place(registry, key)
    registry, key = sites.more
    out, kmap = registry.layer_map(key, spec)
    if out == key:
        return Made(kmap)
    return Made(kmap, Sites(registry.grid(out).coords, MapStore(), _Place(registry, out)))


coordinates.register(_BUILDER, _build)


def sites_of(x: Any) -> Traced | None:
    """The coordinates of a traced tensor; None for a second map that was made outside of the graph,
    of which the graph would not know how it belongs to the first."""
    registry, key = x._manager._manager, x.coordinate_map_key._key
    known: Traced | None = registry.traced.get(key)
    if known is None and not registry.traced:
        known = registry.traced[key] = coordinates.entered(registry.grids[key].coords)
    return known


def _output_key(traced: dict[Key, Traced], key: Key, spec: Any) -> Key:
    """Where a layer writes, as `MapRegistry.output_key`."""
    stride, name = key
    strided = any(s > 1 for s in spec.stride)
    if not spec.expand and not strided:
        return key
    pairs = zip(stride, spec.stride, strict=True)
    if spec.transposed:
        if any(t % s for t, s in pairs):
            raise ContractError(
                f"a transposed layer of stride {list(spec.stride)} on tensor stride "
                f"{list(stride)}; the stride must divide it."
            )
        found = tuple(t // s for t, s in zip(stride, spec.stride, strict=True)), ""
    else:
        found = tuple(t * s for t, s in pairs), "" if spec.expand else name
    if spec.expand and found in traced:
        return found[0], f"{found[1]}-{len(traced)}"
    return found


def _insert(
    coords: torch.Tensor, stride: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    registry = MapRegistry(coords.shape[1] - 1)
    key, first, _ = registry.insert(coords, tuple(stride))
    if first is None:
        first = torch.arange(coords.shape[0], device=coords.device)
    if first.shape[0] < 2:
        raise ShapeError(
            f"a compiled graph got {first.shape[0]} distinct coordinates; it serves 2 and more. "
            "Run scenes as small as this one through the eager model."
        )
    distinct = registry.grid(key).coords
    place = Sites(distinct, MapStore(), _Place(registry, key))
    return first, distinct.clone(), handles.make(place)


def _fake_insert(
    coords: torch.Tensor, stride: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_rows = torch.library.get_ctx().new_dynamic_size(min=2)
    first = coords.new_empty(n_rows, dtype=torch.int64)
    return first, coords.new_empty((n_rows, coords.shape[1])), handles.like()


define(
    "minkowski_insert", "(Tensor coords, int[] stride) -> (Tensor, Tensor, Tensor)", _insert,
    _fake_insert,
)  # fmt: skip


def inserted(
    x: Any, features: torch.Tensor, coords: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, coordinates) of a tensor made in a graph: of equal coordinates the first row.

    Raises UnsupportedError for other modes of quantisation, and for a second map.
    """
    if x.quantization_mode is not SparseTensorQuantizationMode.RANDOM_SUBSAMPLE:
        raise UnsupportedError(
            f"a SparseTensor with {x.quantization_mode} is made in a compiled graph; make it "
            "outside, or use RANDOM_SUBSAMPLE."
        )
    traced, key = x._manager._manager.traced, x.coordinate_map_key._key
    if traced:
        raise UnsupportedError(
            "a compiled graph makes a second SparseTensor in one coordinate manager; make it "
            "outside, or from the coordinate_map_key of the first."
        )
    first, coords, handle = torch.ops.sparse_bridge.minkowski_insert(coords, list(key[0]))
    traced[key] = Traced(coords, handle, True)
    return features.index_select(0, first), coords


class _Kernel(NamedTuple):
    """What `_output_key` asks of a kernel."""

    stride: tuple[int, ...]
    expand: bool
    transposed: bool


def served(module: Any, x: Any, given: Any) -> bool:
    """Whether a convolution becomes operators: not onto given coordinates, nor on tensors that were
    pooled globally, nor over several maps of the user's manager."""
    return given is None and 0 not in x.coordinate_map_key._key[0] and sites_of(x) is not None


def convolved(
    module: Any, x: Any, kernel: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, Key, torch.Tensor]:
    """(features, key and coordinates of the output) of a convolution with a map."""
    traced, key, generator = x._manager._manager.traced, x.coordinate_map_key._key, (
        module.kernel_generator
    )  # fmt: skip
    what, sites = type(module).__name__, traced[key]
    size, step = tuple(generator.kernel_size), tuple(generator.kernel_stride)
    expand, transposed = bool(generator.expand_coordinates), bool(module.is_transpose)
    points = _points(
        int(generator.region_type), size, tuple(generator.kernel_dilation), generator._listed
    )
    numbers = [len(step), int(transposed), int(expand), *key[0], *size, *step, *points]
    out_key = _output_key(traced, key, _Kernel(step, expand, transposed))
    known = traced.get(out_key)
    if known is None:
        handle, known = sites.new_map(_BUILDER, numbers, torch.is_grad_enabled())
        traced[out_key] = known
    else:
        handle = sites.map(_BUILDER, numbers)
    check_features(x._F, sites.coords.shape[0], sites.coords.device, what)
    check_weight(x._F, kernel, kernel.shape[-2], len(points) // len(step), what)
    tf32 = x._F.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    form = ConvForm(precision="tf32" if tf32 else "ieee")
    if kernel.dim() == 2:
        kernel = kernel.unsqueeze(0)
    flat = None if bias is None else bias.view(-1)
    y = products.conv(x._F, kernel, Epilogue(flat), handle, known.coords.shape[0], form)
    return y, out_key, known.coords
