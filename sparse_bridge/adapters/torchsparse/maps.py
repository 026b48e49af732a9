"""From coordinates in the framework's layout to coordinate maps and kernel maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.geometry.boxes import Box
from ...core.maps import map_builder, map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.map_cache import MapStore
from ...errors import CoordinateError, DataTypeError, ShapeError
from .geometry import CORE_COLUMNS, Bounds, Layer, output_sites
from .profile import Profile
from .records import Record

__all__ = [
    "adopt_sites",
    "bounds_of",
    "build_record",
    "check_coords",
    "check_range",
    "coordinate_map",
    "core_rows",
]

Range = tuple[int, ...]
_OURS = ("made here",)


def check_coords(coords: Any, what: str) -> torch.Tensor:
    """`coords` if they are int32 [N, 4] in a tensor. Raises DataTypeError, ShapeError."""
    if not isinstance(coords, torch.Tensor):
        raise DataTypeError(
            f"{what} got coordinates in a {type(coords).__name__}; expected a tensor (numpy arrays "
            "become tensors in sparse_collate)."
        )
    if coords.ndim != 2 or coords.shape[1] != 4:
        raise ShapeError(f"{what} got coordinates of shape {list(coords.shape)}; expected [N, 4].")
    if coords.dtype != torch.int32:
        raise DataTypeError(
            f"{what} got coordinates of {coords.dtype}; expected torch.int32 (use .int())."
        )
    return coords


def core_rows(coords: torch.Tensor, profile: Profile) -> torch.Tensor:
    """Rows [b, z, y, x], contiguous."""
    return coords[:, CORE_COLUMNS if profile.batch_first else [3, 2, 1, 0]]


def bounds_of(store: MapStore, coords: torch.Tensor, profile: Profile) -> Bounds:
    """Exact bounds, batch first; waits for the device the first time."""

    def build() -> Bounds:
        if coords.shape[0] == 0:
            return (0, 0, 0, 0), (-1, -1, -1, -1)
        low, high = torch.stack(coords.aminmax(dim=0)).tolist()
        if not profile.batch_first:
            low, high = [low[3], *low[:3]], [high[3], *high[:3]]
        return tuple(low), tuple(high)

    return store.get("bounds", build)


def _grid_of(spatial_range: Sequence[int] | None) -> Box | None:
    """The cells of a `spatial_range`; None where it gives no usable grid."""
    if spatial_range is None or min(spatial_range[:4]) < 1:
        return None
    box = _core_box((0, 0, 0, 0), tuple(int(extent) for extent in spatial_range[:4]))
    return None if box.oversized else box


def _core_box(lo: Sequence[int], size: Sequence[int]) -> Box:
    """A box given as [b, x, y, z]."""
    return Box.spanning(
        tuple(lo[column] for column in CORE_COLUMNS), tuple(size[column] for column in CORE_COLUMNS)
    )


def coordinate_map(
    store: MapStore, coords: torch.Tensor, profile: Profile, spatial_range: Range | None = None
) -> CoordinateMap:
    """The coordinates in the core's order, all of them live.

    `spatial_range` only saves a look at the data.
    """

    def build() -> CoordinateMap:
        rows = core_rows(coords, profile)
        grid = _grid_of(spatial_range)
        if grid is not None:
            found = CoordinateMap(rows, grid)
            if found.alive is None:
                return found
        low, high = bounds_of(store, coords, profile)
        size = tuple(h - lo + 1 for lo, h in zip(low, high, strict=True))
        return CoordinateMap(rows, _core_box(low, size))

    return store.get("coordinates", build)


def _outside(bounds: Bounds, spatial_range: Range) -> str | None:
    """What leaves the range, in words."""
    low, high = bounds
    for axis, extent in enumerate(spatial_range[1:4]):
        wrong = low[axis + 1] if low[axis + 1] < 0 else high[axis + 1]
        if not 0 <= wrong < extent and high[axis + 1] >= low[axis + 1]:
            return f"a coordinate along axis {'xyz'[axis]} is {wrong}; 0 <= c < {extent} is allowed"
    return None


def _box_bounds(box: Box) -> Bounds:
    """Bounds [b, x, y, z] of a box of the core."""
    low = tuple(box.lo[column] for column in CORE_COLUMNS)
    size = tuple(box.size[column] for column in CORE_COLUMNS)
    high = tuple(lo + extent - 1 for lo, extent in zip(low, size, strict=True))
    return low, high  # type: ignore[return-value]


def check_range(
    store: MapStore, coords: torch.Tensor, profile: Profile, spatial_range: Range, what: str
) -> bool:
    """Whether all rows lie in `spatial_range`.

    False only for a range that a layer here gave the rows (even kernels shrink it although the
    coordinates stay). Raises CoordinateError for a range of the user that its rows leave.
    """
    cmap = coordinate_map(store, coords, profile, spatial_range)
    if _outside(_box_bounds(cmap.box), spatial_range) is None:
        return True
    wrong = _outside(bounds_of(store, coords, profile), spatial_range)
    if wrong is None:
        return True
    whole = store.get(("shrunk", spatial_range[:4]), tuple)
    if whole == _OURS or (whole and _outside(bounds_of(store, coords, profile), whole) is None):
        return False
    raise CoordinateError(
        f"{what}: {wrong} by spatial_range {tuple(spatial_range)} (batch, x, y, z). Correct the "
        "range, drop such rows, or give no range."
    )


def adopt_sites(sites: torch.Tensor, box: Box, profile: Profile) -> tuple[torch.Tensor, MapStore]:
    """Distinct coordinates [b, x, y, z] inside `box` as a tensor of the framework's layout.

    Returns it and its store, which lives with it and knows the coordinate map.
    """

    def make() -> torch.Tensor:
        if not profile.batch_first:
            return sites[:, [1, 2, 3, 0]]
        return sites.clone() if sites.is_inference() else sites

    coords = map_cache.normal_tensor(make)
    cmap = CoordinateMap(sites[:, CORE_COLUMNS], _core_box(box.lo, box.size))
    cmap.adopt()
    store = MapStore()
    store.put("coordinates", cmap)
    map_cache.adopt(coords, store)
    return coords, store


def build_record(
    coords: torch.Tensor,
    profile: Profile,
    layer: Layer,
    spatial_range: Range | None,
    out_range: Range | None,
    what: str,
) -> Record:
    """The map of `layer` on `coords`, shared by all layers of this geometry on this tensor."""
    store = map_cache.store_of(coords)
    if layer.sites is None:

        def submanifold() -> Any:
            cmap = coordinate_map(store, coords, profile, spatial_range)
            return map_builder.submanifold(cmap, layer.offsets)

        kmap = store.get(("map", layer), submanifold)
        if out_range is not None and spatial_range is not None and out_range != spatial_range[:4]:
            before = store.get(("shrunk", spatial_range[:4]), tuple)
            store.put(("shrunk", out_range), before or spatial_range[:4])
        return Record(kmap, coords, coords, spatial_range, out_range, (store,))

    def strided() -> Any:
        x_map, bounds = _source(store, coords, profile, spatial_range, what)
        assert layer.sites is not None
        sites, box = output_sites(layer.sites, x_map, bounds, spatial_range)
        out, out_store = adopt_sites(sites, box, profile)
        y_map = coordinate_map(out_store, out, profile)
        return out, out_store, map_builder.between(x_map, y_map, layer.offsets, layer.step)

    key = ("map", layer, None if spatial_range is None else spatial_range[:4])
    out_coords, out_store, kmap = store.get(key, strided)
    if out_range is not None:
        out_store.put(("shrunk", out_range), _OURS)
    return Record(kmap, coords, out_coords, spatial_range, out_range, (store, out_store))


def _source(
    store: MapStore,
    coords: torch.Tensor,
    profile: Profile,
    spatial_range: Range | None,
    what: str,
) -> tuple[CoordinateMap, Bounds]:
    """Inputs of a strided layer and their bounds; rows outside the range are dead."""
    if spatial_range is None:
        cmap = coordinate_map(store, coords, profile)
        return cmap, bounds_of(store, coords, profile)
    if check_range(store, coords, profile, spatial_range, what):
        cmap = coordinate_map(store, coords, profile)
        return cmap, _box_bounds(cmap.box)
    low, high = bounds_of(store, coords, profile)
    extents = [max(0, int(extent)) for extent in spatial_range[1:4]]
    box = _core_box((low[0], 0, 0, 0), (high[0] - low[0] + 1, *extents))
    return CoordinateMap(core_rows(coords, profile), box), (low, high)
