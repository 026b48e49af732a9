"""Convolutions of torchsparse while a program is traced: by `torch.compile` or `torch.export`.

Tensor strides, keys and ranges are worked out while the program is traced; coordinates and maps
are operators. What the graph knows of them stands in the tensor's own `kmaps`, under keys that
start with `TRACED`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ...core.compile import coordinates, products
from ...core.compile import point_functions as point_functions  # registers operators
from ...core.compile import row_functions as row_functions
from ...core.compile.coordinates import BuilderResult, Sites, Traced
from ...core.compile.library import define
from ...core.conv.epilogue import Epilogue
from ...core.traced.graphs import outside as outside
from . import records
from .errors import MissingMapError
from .geometry import layer_of, shrunk_range
from .levels import generated_level
from .maps import as_tensor, build_record, coordinate_map
from .options import Options, resolve
from .profile import PROFILES, Profile
from .records import TRACED
from .spec import ONE, ConvSpec, MapKey
from .tensors import caches_of, item_counts, range_of

ops: Any = torch.ops.sparse_bridge
_BUILDER, _GENERATIVE = "torchsparse", "torchsparse generative"
_RELEASES = tuple(PROFILES)
_MODES = ("hashmap_on_the_fly", "hashmap")
_RULES = ("spconv", "minkowski")


class Record:
    """What a graph knows of a layer's map. handle: of the kernel map, fine to coarse."""

    def __init__(self, in_sites: Traced, out_sites: Traced, ranges: tuple[Any, Any], handle: Any) -> None:
        self.in_sites, self.out_sites, self.handle = in_sites, out_sites, handle
        self.in_range, self.out_range = ranges


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _options(release: str, config: Any) -> tuple[int, int, int]:
    options = resolve(PROFILES[release], config)
    return _MODES.index(options.kmap_mode), _RULES.index(options.downsample_mode), int(options.keep_tail)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keeps_sites(numbers: tuple[int, ...]) -> bool:
    """Whether outputs are the inputs; also raises what the geometry is refused for."""
    return _layer(numbers)[1].sites is None


@functools.cache
def _layer(numbers: tuple[int, ...]) -> tuple[Profile, Any, Options]:
    release, (mode, rule, tail) = PROFILES[_RELEASES[numbers[0]]], numbers[13:16]
    kernel, stride, padding, tensor_stride = (numbers[1 + 3 * i : 4 + 3 * i] for i in range(4))
    options = Options(_MODES[mode], _RULES[rule], bool(tail))
    layer = layer_of(
        release.name,
        kernel,
        stride,
        padding,
        tensor_stride,
        options.kmap_mode,
        options.downsample_mode,
        options.keep_tail,
    )  # type: ignore[arg-type]
    return release, layer, options


def _build(sites: Sites, numbers: Sequence[int]) -> BuilderResult:
    """numbers: 16 of the layer, then its input's range or nothing."""
    own, in_range = tuple(numbers[:16]), tuple(numbers[16:]) or None
    release, layer, options = _layer(own)
    kernel, stride, padding = own[1:4], own[4:7], own[7:10]
    out_range = shrunk_range(in_range, kernel, stride, padding, options.keep_tail)  # type: ignore[arg-type]
    record = build_record(sites.coords, release, layer, in_range, out_range, "Conv3d", sites.store)
    if record.out_coords is record.in_coords:
        return BuilderResult(record.kmap)
    return BuilderResult(record.kmap, Sites(record.out_coords, record.stores[1]))


def _generate(sites: Sites, numbers: Sequence[int]) -> BuilderResult:
    """numbers: release, kernel, stride, the output's range."""
    release, kernel, stride = _RELEASES[numbers[0]], tuple(numbers[1:4]), tuple(numbers[4:7])
    profile = PROFILES[release]
    coarse = coordinate_map(sites.store, sites.coords, profile)
    level = generated_level(coarse, sites.store, kernel, stride, tuple(numbers[7:]))
    assert level.kmap is not None
    return BuilderResult(level.kmap, Sites(as_tensor(level, profile), level.store))


coordinates.register(_BUILDER, _build)
coordinates.register(_GENERATIVE, _generate)


def sites_of(x: Any) -> Traced:
    """The coordinates of a traced tensor."""
    cached = caches_of(x).kmaps.get((TRACED, x.stride))
    if cached is not None and cached.coords is x.coords:
        sites: Traced = cached
        return sites
    return coordinates.entered(x.coords)


def record_of(x: Any, spec: ConvSpec, key: MapKey, config: Any) -> Record:
    """The map of a forward layer: the cached one if it starts from x, or a new one."""
    kmaps, name = caches_of(x).kmaps, (TRACED, *key)
    cached = kmaps.get(name)
    if cached is not None and cached.in_sites.coords is x.coords:
        record: Record = cached
        return record
    release = spec.release
    in_range = range_of(x) if release.divides else None
    kernel, stride, padding = spec.kernel, spec.stride, spec.padding
    options = _options(release.name, config)
    # Graphs hold for one tensor stride; torch may have made a symbol of it.
    steps = ONE if release.divides else [operator.index(step) for step in key[0]]
    own = (_RELEASES.index(release.name), *kernel, *stride, *padding, *steps, *options)
    numbers, in_sites = [*own, *(in_range or ())], sites_of(x)
    if _keeps_sites(own):
        handle, out_sites = in_sites.map(_BUILDER, numbers), in_sites
    else:
        handle, out_sites = in_sites.new_map(_BUILDER, numbers, torch.is_grad_enabled())
    out_range = shrunk_range(in_range, kernel, stride, padding, bool(options[2]))
    record = kmaps[name] = Record(in_sites, out_sites, (in_range, out_range), handle)
    return record


def reverses(x: Any, key: MapKey) -> bool:
    """Whether a transposed layer on x is for the graph: it knows the map, or nobody does."""
    kmaps = caches_of(x).kmaps
    cached = kmaps.get((TRACED, *key))
    if cached is not None and cached.out_sites.coords is x.coords:
        return True
    return cached is None and key not in kmaps


def record_from_graph(kmaps: Any, key: MapKey) -> records.Record | None:
    """What a graph put into `kmaps` under `key`, for layers outside of it."""
    cached = kmaps.get((TRACED, *key))
    if cached is None:
        return None
    ends, ranges = (cached.in_sites.coords, cached.out_sites.coords), (cached.in_range, cached.out_range)
    return records.Record(products.map_of(cached.handle, False), *ends, *ranges)


def earlier_record(x: Any, key: MapKey) -> Record:
    """The map of the layer that made x's coordinates. Raises MissingMapError."""
    kmaps = caches_of(x).kmaps
    record: Record | None = kmaps.get((TRACED, *key))
    if record is None:
        raise MissingMapError(
            f"a transposed Conv3d at tensor stride {x.stride} needs the map of an earlier layer "
            f"with the key {key} in the same graph."
        )
    if record.out_sites.coords is not x.coords:
        raise MissingMapError(
            f"the map for tensor strides {key[0]} to {x.stride} does not end at the coordinates of "
            "this tensor, so a transposed Conv3d cannot reverse it."
        )
    return record


def generated(x: Any, spec: ConvSpec, out_range: Sequence[int]) -> Record:
    """The map of a layer that makes new coordinates around every input."""
    in_sites = sites_of(x)
    numbers = [_RELEASES.index(spec.release.name), *spec.kernel, *spec.stride, *out_range]
    handle, out_sites = in_sites.new_map(_GENERATIVE, numbers, torch.is_grad_enabled())
    return Record(in_sites, out_sites, (range_of(x), tuple(out_range)), handle)


def multiplied(
    feats: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, record: Record, form: Any, transposed: bool
) -> torch.Tensor:
    """The product over a record's map."""
    sites = record.in_sites if transposed else record.out_sites
    rows = sites.coords.shape[0]
    return products.conv(feats, weight, Epilogue(bias), record.handle, rows, form, transposed)


def remember(x: Any, stride: Any, sites: Traced) -> None:
    """Let layers on the output find its coordinates."""
    caches_of(x).kmaps[TRACED, stride] = sites


def _items(coords: torch.Tensor, column: int, caller: str) -> torch.Tensor:
    batch = coords[:, column]
    least, most = (int(bound) for bound in batch.aminmax()) if len(batch) else (0, -1)
    return item_counts(batch, least, most, caller)


define(
    "torchsparse_items",
    "(Tensor coords, int column, str caller) -> Tensor",
    _items,
    lambda coords, column, caller: coords.new_empty(torch.library.get_ctx().new_dynamic_size(min=1), dtype=torch.int64),
)
