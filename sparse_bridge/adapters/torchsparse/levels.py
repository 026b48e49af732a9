"""Levels that strided and transposed layers make: output coordinates, in the units of a release, and the map there.

Up to 2.0 coordinates keep the units of the input at every level. Maps are asked for between coordinates in units of
their own level, as in 2.1, so that they may be prefetched, and keys have few bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...core.geometry.boxes import Box
from ...core.geometry.constants import constant
from ...core.geometry.offsets import Offsets
from ...core.geometry.reach import BoxReach
from ...core.maps import map_builder
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import MapRequest, request
from ...refusals import Refusal, Why
from .geometry import (
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

__all__ = ["Level", "Units", "between", "generated_level", "strided_level"]

Range = tuple[int, ...]
Steps = tuple[int, ...]


class Level(NamedTuple):
    """coords: output coordinates, distinct.  store: of all that is asked over them.  kmap: the map
    there, for the offsets that reach exactly them; None where there is none.  gathers: (offsets,
    step) of that map, as in `Layer`."""

    coords: CoordinateMap
    store: MapStore
    kmap: KernelMap | None = None
    gathers: tuple[Offsets, Steps] | None = None


class Units(NamedTuple):
    """Coordinates that are multiples of `scale`, divided by it, and their store. Offsets between them are small, and
    kernel maps those of a level of its own, whatever the tensor stride."""

    scale: Steps
    coords: CoordinateMap
    store: MapStore

    @staticmethod
    def of(coords: CoordinateMap, store: MapStore) -> Units:
        """Of coordinates, and their store."""
        found: Units | None = store.peek("units")
        return Units((1, 1, 1), coords, store) if found is None else found

    def divided(self, offsets: Offsets) -> Offsets | None:
        """The same offsets between these coordinates; None where they reach between them."""
        return offsets if self.scale == (1, 1, 1) else _divided(offsets, self.scale)

    def sites(self, sites: Sites) -> Sites | None:
        """The same sites between these coordinates; None where they do not lie between them."""
        if self.scale == (1, 1, 1) or sites.kind not in ("cells", "reached"):
            return None
        parts = _ratios([sites.cell, *sites.shifts], self.scale[::-1])
        return None if parts is None else dataclasses.replace(sites, cell=parts[0], shifts=tuple(parts[1:]))


def _ratios(rows: Sequence[Sequence[int]], scale: Steps) -> list[Any] | None:
    """Rows of three numbers, each divided by that of its axis; None where that leaves a rest."""
    if any(c % s for row in rows for c, s in zip(row, scale, strict=True)):
        return None
    return [tuple(c // s for c, s in zip(row, scale, strict=True)) for row in rows]


@functools.lru_cache(maxsize=1024)
def _divided(offsets: Offsets, scale: Steps) -> Offsets | None:
    parts = _ratios(offsets.values, scale)
    return None if parts is None else Offsets.of(parts)


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
    scale: Steps = (1, 1, 1)
    units = Units.of(x, store)
    small = units.sites(sites)
    bounds: Bounds | None
    if small is not None and not truncated(small, bounds := box_bounds(units.coords.extent)):
        scale, x, store = units
        sites = small
    else:
        padded = x.rows.host is None
        if padded and small is not None:  # a level whose bounds are on the device alone
            raise Refusal(Why.GRAPH_NEGATIVE)
        bounds = None if x.unbounded and not sites.truncate else get_bounds()
        if bounds is not None and truncated(sites, bounds):
            if padded:
                raise Refusal(Why.GRAPH_NEGATIVE)
            rows = cell_rows(sites, x.coords if x.alive is None else x.coords[x.alive >= 0])
            cmap = map_builder.distinct(rows, core_box(truncated_bounds(bounds)))
            return Level(cmap, MapStore(cmap))
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
    if spatial_range is None and exact:
        built.store.put("bounds", out_bounds)
        if built.coords.tight is None and built.coords.n_rows:
            built.coords.tight = core_box(out_bounds)
    if max(reach.scale) == 1 and max(scale) == 1:
        return Level(built.coords, built.store, built.kmap, (reach.offsets, reach.step))
    offsets = [[c * s for c, s in zip(o, scale, strict=True)] for o in reach.offsets.values]
    scale = tuple(a * b for a, b in zip(reach.scale, scale, strict=True))
    cmap = _scaled(built.coords, scale)
    cmap_store = MapStore(cmap)
    cmap_store.put("units", Units(scale, built.coords, built.store))
    if spatial_range is None and exact:
        cmap_store.put("bounds", box_bounds(cmap.box))
    return Level(cmap, cmap_store, built.kmap, (Offsets.of(offsets), (1, 1, 1)))


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
        x.rows.require_host_count("a transposed layer that moves rows into their range")
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


def between(layer: Layer, x: CoordinateMap, store: MapStore, level: Level) -> KernelMap:
    """The map of a strided layer from `x` to its level: between the units of both, where its offsets are of these."""
    own, out = Units.of(x, store), Units.of(level.coords, level.store)
    offsets = own.divided(layer.offsets)
    steps = _ratios([[a * b for a, b in zip(layer.step, out.scale, strict=True)]], own.scale)
    if offsets is None or steps is None:
        return request(store, x, MapRequest("between", layer.offsets, layer.step, level.coords)).kmap
    return request(own.store, own.coords, MapRequest("between", offsets, steps[0], out.coords)).kmap
