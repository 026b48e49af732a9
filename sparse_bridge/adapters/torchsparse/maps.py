"""From coordinates in the framework's layout to coordinate maps and kernel maps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...core.geometry.boxes import Box
from ...core.geometry.constants import constant
from ...core.geometry.data_bounds import DataBounds
from ...core.geometry.offsets import Offsets
from ...core.geometry.reach import BoxReach
from ...core.maps import map_builder, map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import MapRequest, announce, request
from ...errors import CoordinateError
from .. import providers  # noqa: F401 - maps are prefetched
from .equal_rows import among_themselves
from .geometry import (
    CORE_COLUMNS,
    Bounds,
    Layer,
    Sites,
    box_bounds,
    cell_rows,
    clamped_rows,
    core_box,
    core_offsets,
    generated_bounds,
    kernel_offsets,
    output_rule,
    reach_bounds,
    reach_of,
    truncated,
    truncated_bounds,
)
from .profile import Profile
from .records import Record

__all__ = [
    "Level",
    "as_tensor",
    "bounds_of",
    "build_record",
    "check_range",
    "coordinate_map",
    "core_rows",
    "generated_level",
    "inside_range",
    "strided_level",
]

Range = tuple[int, ...]
Steps = tuple[int, ...]
_OURS = ("made here",)


def core_rows(coords: torch.Tensor, profile: Profile) -> torch.Tensor:
    """Rows [b, z, y, x], contiguous."""
    return _permuted(coords, profile)


def _permuted(coords: torch.Tensor, profile: Profile) -> torch.Tensor:
    """From the framework's columns to the core's, or back."""
    columns = tuple(CORE_COLUMNS) if profile.batch_first else (3, 2, 1, 0)
    return coords.index_select(1, constant(columns, coords.device))


def bounds_of(store: MapStore, coords: torch.Tensor, profile: Profile) -> Bounds:
    """Exact bounds, batch first; waits for the device the first time."""

    def build() -> Bounds:
        if coords.shape[0] == 0:
            return (0, 0, 0, 0), (-1, -1, -1, -1)
        if store.root is not None and store.root.loose:
            return box_bounds(store.root.extent)
        return box_bounds(_data_bounds(store, coords, profile).box)

    return store.get("bounds", build)


def _data_bounds(store: MapStore, coords: torch.Tensor, profile: Profile) -> DataBounds:
    """Exact bounds, which nobody has to wait for yet."""
    return store.get("data bounds", lambda: DataBounds(core_rows(coords, profile)))


def _grid_of(spatial_range: Sequence[int] | None) -> Box | None:
    """The cells of a `spatial_range`; None where it gives no usable grid."""
    if spatial_range is None or min(spatial_range[:4]) < 1:
        return None
    most = tuple(int(extent) - 1 for extent in spatial_range[:4])
    box = core_box(((0, 0, 0, 0), most))  # type: ignore[arg-type]
    return None if box.oversized else box


def coordinate_map(
    store: MapStore, coords: torch.Tensor, profile: Profile, spatial_range: Range | None = None
) -> CoordinateMap:
    """The coordinates in the core's order, all of them live.

    `spatial_range` only saves a look at the data; what follows is prepared with the look at
    whether rows lie in it.
    """

    def build() -> CoordinateMap:
        grid = _grid_of(spatial_range)
        if grid is not None:
            cmap = CoordinateMap(core_rows(coords, profile), grid)
            announce(store, cmap, "range")
            if cmap.alive is None:
                return cmap
        if coords.shape[0] == 0 or store.peek("bounds") is not None:
            box = core_box(bounds_of(store, coords, profile))
            return CoordinateMap(core_rows(coords, profile), box)
        bounds = _data_bounds(store, coords, profile)
        return CoordinateMap(bounds.coords, bounds)

    return store.get("coordinates", build) if store.root is None else store.root


def _outside(bounds: Bounds, spatial_range: Range) -> str | None:
    """What leaves the range, in words."""
    low, high = bounds
    for axis, extent in enumerate(spatial_range[1:4]):
        wrong = low[axis + 1] if low[axis + 1] < 0 else high[axis + 1]
        if not 0 <= wrong < extent and high[axis + 1] >= low[axis + 1]:
            return f"a coordinate along axis {'xyz'[axis]} is {wrong}; 0 <= c < {extent} is allowed"
    return None


def check_range(store: MapStore, coords: torch.Tensor, profile: Profile, spatial_range: Range, caller: str) -> bool:
    """Whether all rows lie in `spatial_range`.

    False only for a range that a layer here gave the rows (even kernels shrink it although the
    coordinates stay). Raises CoordinateError for a range of the user that its rows leave.
    """
    cmap = coordinate_map(store, coords, profile, spatial_range)
    if _outside(box_bounds(cmap.box), spatial_range) is None:
        return True
    wrong = _outside(bounds_of(store, coords, profile), spatial_range)
    if wrong is None:
        return True
    original = store.get(("shrunk", spatial_range[:4]), tuple)
    if original == _OURS or (original and _outside(bounds_of(store, coords, profile), original) is None):
        return False
    raise CoordinateError(
        f"{caller}: {wrong} by spatial_range {tuple(spatial_range)} (batch, x, y, z). Correct the "
        "range, drop such rows, or give no range."
    )


def as_tensor(level: Level, profile: Profile) -> torch.Tensor:
    """The coordinates of `level` in the framework's layout, a tensor that keeps its store alive."""
    rows = level.coords.coords
    coords = map_cache.normal_tensor(lambda: _permuted(rows, profile))
    map_cache.adopt(coords, level.store)
    return coords


class Level(NamedTuple):
    """coords: output coordinates, distinct.  store: of all that is asked over them.  kmap: the map
    there, for the offsets that reach exactly them; None where there is none.  gathers: (offsets,
    step) of that map, as in `Layer`."""

    coords: CoordinateMap
    store: MapStore
    kmap: KernelMap | None = None
    gathers: tuple[Offsets, Steps] | None = None


class Units(NamedTuple):
    """Coordinates that are multiples of `scale`, divided by it, and their store. Cells in them have
    few offsets, whatever the tensor stride."""

    scale: Steps
    coords: CoordinateMap
    store: MapStore

    def divided(self, offsets: Offsets) -> Offsets | None:
        """The same offsets between these coordinates; None where they reach between them."""
        if any(c % s for offset in offsets.values for c, s in zip(offset, self.scale, strict=True)):
            return None
        return Offsets.of([tuple(c // s for c, s in zip(offset, self.scale, strict=True)) for offset in offsets.values])


def strided_level(
    sites: Sites,
    x: CoordinateMap,
    store: MapStore,
    get_bounds: Callable[[], Bounds],
    spatial_range: Sequence[int] | None,
) -> Level:
    """The outputs of a strided layer, in ascending order.

    x: live rows take part; store: of x.  get_bounds: of its rows, exact where `spatial_range` is
    None; they may have to be waited for.
    """
    bounds = None if x.unbounded and not sites.truncate else get_bounds()
    if bounds is not None and truncated(sites, bounds):
        rows = cell_rows(sites, x.coords if x.alive is None else x.coords[x.alive >= 0])
        cmap = map_builder.distinct(rows, core_box(truncated_bounds(bounds)))
        return Level(cmap, MapStore(cmap))
    scale: Steps = (1, 1, 1)
    units: Units | None = store.peek("units")
    if units is not None and sites.kind == "cells":
        cell = tuple(zip(sites.cell, units.scale[::-1], strict=True))
        if all(c % s == 0 for c, s in cell):
            scale, x, store = units
            bounds, small = box_bounds(x.extent), tuple(c // s for c, s in cell)
            sites = dataclasses.replace(sites, cell=small)  # type: ignore[arg-type]
    reach = reach_of(sites)
    rule = output_rule(sites)  # holds for other scenes, too
    if spatial_range is not None:  # and not the data says where coordinates end
        rule = rule._replace(loose=False)
    output: Box | BoxReach = rule
    if bounds is not None:
        box = core_box(reach_bounds(sites, bounds, spatial_range)[0])
        output = rule if x.n_rows == 0 or rule.output_box(x.extent) is box else box
    built = request(store, x, MapRequest("strided", reach.offsets, reach.step, output, "sorted"))
    assert built.coords is not None and built.store is not None
    out_bounds, exact = reach_bounds(sites, bounds or get_bounds(), spatial_range)
    if max(reach.scale) > 1 or max(scale) > 1:
        offsets = [[c * s for c, s in zip(o, scale, strict=True)] for o in reach.offsets.values]
        scale = tuple(a * b for a, b in zip(reach.scale, scale, strict=True))
        cmap = _scaled(built.coords, scale)
        cmap_store = MapStore(cmap)
        cmap_store.put("units", Units(scale, built.coords, built.store))
        return Level(cmap, cmap_store, built.kmap, (Offsets.of(offsets), (1, 1, 1)))
    if spatial_range is None and exact:
        built.store.put("bounds", out_bounds)
        if built.coords.tight is None and built.coords.n_rows:
            built.coords.tight = core_box(out_bounds)
    return Level(built.coords, built.store, built.kmap, (reach.offsets, reach.step))


def _scaled(cmap: CoordinateMap, scale: tuple[int, ...]) -> CoordinateMap:
    """The same rows, every axis times `scale`."""
    factor, box = (1, *scale), cmap.box
    lo = tuple(c * f for c, f in zip(box.lo, factor, strict=True))
    size = tuple(max(0, (n - 1) * f + 1) for n, f in zip(box.size, factor, strict=True))
    scaled = CoordinateMap(cmap.coords * constant(factor, cmap.device), Box.spanning(lo, size), cmap.rows)
    scaled.adopt()
    return scaled


def generated_level(x: CoordinateMap, store: MapStore, kernel: Range, stride: Range, out_range: Sequence[int]) -> Level:
    """Every site x * stride + kernel offset, moved into `out_range` where it leaves it (2.1), in
    ascending order; the map gathers the first input at q = x * stride - offset."""
    low, high = generated_bounds(x.box, kernel, stride)  # type: ignore[arg-type]
    most = tuple(int(extent) - 1 for extent in out_range[1:4])
    box = core_box(((low[0], 0, 0, 0), (high[0], *most)))  # type: ignore[arg-type]
    offsets = core_offsets(kernel_offsets(kernel))  # type: ignore[arg-type]
    back = Offsets.of([tuple(-c for c in offset) for offset in offsets.values])
    if min(low[1:]) < 0 or any(h > m for h, m in zip(high[1:], most, strict=True)):
        rows = clamped_rows(x.coords, kernel, stride, out_range)  # type: ignore[arg-type]
        cmap = map_builder.distinct(rows, box)
        level = Level(cmap, MapStore(cmap))
    else:
        falls_out = set(back.values) == set(offsets.values)
        map_request = MapRequest("generative", back if falls_out else offsets, stride[::-1], box, "sorted")
        built = request(store, x, map_request)
        assert built.coords is not None and built.store is not None
        level = Level(built.coords, built.store, built.kmap if falls_out else None)
    kmap = level.kmap
    if kmap is None:
        map_request = MapRequest("between", back, stride[::-1], x)
        kmap = request(level.store, level.coords, map_request).kmap.transposed()
    return level._replace(kmap=kmap.of_first_rows())


def build_record(
    coords: torch.Tensor,
    profile: Profile,
    layer: Layer,
    spatial_range: Range | None,
    out_range: Range | None,
    caller: str,
    store: MapStore | None = None,
) -> Record:
    """The map of `layer` on `coords`, shared by all layers of this geometry on this tensor.

    store: of the maps over `coords`, where the tensor does not say it."""
    store = map_cache.store_of(coords) if store is None else store
    if layer.sites is None:
        units: Units | None = store.peek("units")
        offsets = None if units is None else units.divided(layer.offsets)
        if units is None or offsets is None:
            get_cmap = functools.partial(coordinate_map, store, coords, profile, spatial_range)
            kmap = request(store, get_cmap, MapRequest("submanifold", layer.offsets)).kmap
        else:
            kmap = request(units.store, units.coords, MapRequest("submanifold", offsets)).kmap
        kmap = among_themselves(kmap, layer)
        if out_range is not None and spatial_range is not None and out_range != spatial_range[:4]:
            earlier_range = store.get(("shrunk", spatial_range[:4]), tuple)
            store.put(("shrunk", out_range), earlier_range or spatial_range[:4])
        return Record(kmap, coords, coords, spatial_range, out_range, (store,))
    sites = layer.sites

    def strided() -> tuple[torch.Tensor, MapStore, KernelMap]:
        x, x_store, get_bounds = _source(store, coords, profile, spatial_range, caller)
        level = strided_level(sites, x, x_store, get_bounds, spatial_range)
        kmap = level.kmap
        if kmap is None or level.gathers != (layer.offsets, layer.step):
            map_request = MapRequest("between", layer.offsets, layer.step, level.coords)
            kmap = request(x_store, x, map_request).kmap
        return as_tensor(level, profile), level.store, kmap.of_first_rows()

    key = ("map", layer, None if spatial_range is None else spatial_range[:4])
    out_coords, out_store, kmap = store.get(key, strided, lambda built: built[0])
    if out_range is not None:
        out_store.put(("shrunk", out_range), _OURS)
    return Record(kmap, coords, out_coords, spatial_range, out_range, (store, out_store))


def _source(
    store: MapStore, coords: torch.Tensor, profile: Profile, spatial_range: Range | None, caller: str
) -> tuple[CoordinateMap, MapStore, Callable[[], Bounds]]:
    """Inputs of a strided layer, the store of their maps and their bounds, for which one may have
    to wait; rows outside the range are dead."""
    if spatial_range is None:
        cmap = coordinate_map(store, coords, profile)
        return cmap, store, lambda: bounds_of(store, coords, profile)
    if check_range(store, coords, profile, spatial_range, caller):
        cmap = coordinate_map(store, coords, profile)
        return cmap, store, lambda: box_bounds(cmap.box)
    bounds = bounds_of(store, coords, profile)
    cmap = inside_range(coords, profile, bounds, spatial_range)
    return cmap, MapStore(cmap), lambda: bounds


def inside_range(coords: torch.Tensor, profile: Profile, bounds: Bounds, spatial_range: Sequence[int]) -> CoordinateMap:
    """The coordinates, of which those outside the range are dead."""
    most = (max(0, int(extent)) - 1 for extent in spatial_range[1:4])
    box = core_box(((bounds[0][0], 0, 0, 0), (bounds[1][0], *most)))  # type: ignore[arg-type]
    return CoordinateMap(core_rows(coords, profile), box)
