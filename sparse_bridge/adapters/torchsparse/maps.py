"""From coordinates in the framework's layout to coordinate maps and kernel maps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ...core.geometry.boxes import Box
from ...core.geometry.constants import constant
from ...core.geometry.data_bounds import DataBounds
from ...core.maps import map_cache
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore
from ...core.maps.request import MapRequest, announce, request
from ...core.maps.rows import rows_of
from ...errors import CoordinateError
from .. import providers  # noqa: F401 - maps are prefetched
from .equal_rows import among_themselves
from .geometry import CORE_COLUMNS, Bounds, Layer, box_bounds, core_box
from .levels import Level, Units, between, strided_level
from .profile import Profile
from .records import Record

__all__ = [
    "as_tensor",
    "bounds_of",
    "build_record",
    "check_range",
    "coordinate_map",
    "core_rows",
    "exact_bounds",
    "give_range",
    "inside_range",
    "known_to_lie_in",
]

Range = tuple[int, ...]
_NOTHING: Bounds = (0, 0, 0, 0), (-1, -1, -1, -1)
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
        found = exact_bounds(store, coords, profile)
        return box_bounds(found.box if isinstance(found, DataBounds) else found)

    return store.get("bounds", build)


def exact_bounds(store: MapStore, coords: torch.Tensor, profile: Profile) -> Box | DataBounds:
    """The same, in the order of the core; nobody has to wait for them yet. The box of a coordinate map may reach
    further: it may be that of a `spatial_range`."""
    known: Bounds | None = store.peek("bounds")
    if known is not None or coords.shape[0] == 0:
        return core_box(known or _NOTHING)
    root = store.root
    return root.bounds if root is not None and root.loose else _data_bounds(store, coords, profile)


def _data_bounds(store: MapStore, coords: torch.Tensor, profile: Profile) -> DataBounds:
    """Exact bounds, which nobody has to wait for yet. Raises Refusal where a graph is to serve inputs of others."""
    rows_of(coords).require_host_count("a strided layer over coordinates that have lost their range")
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


def known_to_lie_in(cmap: CoordinateMap | None, spatial_range: Range) -> bool:
    """Whether all coordinates are known to lie in `spatial_range`; nobody waits for the device."""
    return cmap is not None and not cmap.unbounded and _outside(box_bounds(cmap.box), spatial_range) is None


def give_range(coords: torch.Tensor, before: Range | None, behind: Range | None, made: bool) -> None:
    """Have later layers know which ranges the layers of a replay have given these coordinates: as `build_record` does
    for one layer. before, behind: of the input, and of the output.  made: the coordinates are new."""
    if before is None or behind is None or before[:4] == behind[:4]:
        return
    store = map_cache.store_of(coords)
    map_cache.adopt(coords, store)
    store.put(("shrunk", behind[:4]), _OURS if made else store.peek(("shrunk", before[:4])) or before[:4])


def check_range(store: MapStore, coords: torch.Tensor, profile: Profile, spatial_range: Range, caller: str) -> bool:
    """Whether all rows lie in `spatial_range`.

    False only for a range that a layer here gave the rows (even kernels shrink it although the
    coordinates stay). Raises CoordinateError for a range of the user that its rows leave.
    """
    cmap = coordinate_map(store, coords, profile, spatial_range)
    if _outside(box_bounds(cmap.box), spatial_range) is None:
        return True
    cmap.rows.require_host_count("a layer behind a spatial_range that coordinates may leave")
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
            kmap = between(layer, x, x_store, level)
        return as_tensor(level, profile), level.store, kmap.of_first_rows()

    key = ("map", layer, None if spatial_range is None else spatial_range[:4])
    out_coords, out_store, kmap = store.get(key, strided, lambda built: built[0])
    if out_range is not None and not known_to_lie_in(out_store.root, out_range):
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
