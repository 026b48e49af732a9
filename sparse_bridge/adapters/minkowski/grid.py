"""One coordinate map of a manager: coordinates as users see them, and as the core searches them.

Users see absolute coordinates. The core gets them divided by a unit that all are multiples of (as a
rule the tensor stride) and with the spatial axes reversed: MinkowskiEngine's kernels run along axis
1 first, the core's along the last axis, and only so do neighbouring offsets meet neighbouring keys.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch

from ...core.device import stream_order
from ...core.geometry.boxes import Box
from ...core.geometry.constants import constant
from ...core.geometry.data_bounds import DataBounds
from ...core.geometry.sparse_data import check_multiples
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.lookup import find_rows
from ...core.maps.map_cache import MapStore
from ...core.maps.request import BuiltMap, MapRequest, announce, request
from ...errors import CoordinateError
from .. import providers  # noqa: F401 - maps are prefetched
from .geometry import KernelSpec
from .strides import Stride, product

Key = tuple[Stride, str]
INT32 = torch.iinfo(torch.int32)


class LayerMap(NamedTuple):
    """What a layer needs of a manager: the key of its output, and the kernel map to it."""

    key: Key
    kmap: KernelMap


def _plain(unit: tuple[int, ...]) -> bool:
    return all(u == 1 for u in unit)


def _reversed(coords: torch.Tensor) -> torch.Tensor:
    """Coordinates [N, 1 + D] with their axes the other way round, in one launch."""
    columns = (0, *range(coords.shape[1] - 1, 0, -1))
    return coords.index_select(1, constant(columns, coords.device))


def _divided(axes: torch.Tensor, unit: tuple[int, ...]) -> torch.Tensor:
    """floor(axes / unit), integer arithmetic at any magnitude."""
    if _plain(unit):
        return axes
    if len(set(unit)) == 1:
        return torch.div(axes, unit[0], rounding_mode="floor")
    return torch.div(axes, constant(unit, axes.device), rounding_mode="floor")


def _multiplied(axes: torch.Tensor, unit: tuple[int, ...]) -> torch.Tensor:
    if _plain(unit):
        return axes
    return axes * (unit[0] if len(set(unit)) == 1 else constant(unit, axes.device))


def _floored(coords: torch.Tensor) -> torch.Tensor:
    return torch.floor(coords.double()) if coords.is_floating_point() else coords.long()


def _saturated(coords: torch.Tensor) -> torch.Tensor:
    """Coordinates of any dtype as int32, floored: those that do not fit at an end of the range."""
    floored = _floored(coords)
    if floored.is_floating_point():
        floored = floored.nan_to_num(nan=INT32.max)
    return floored.clamp(INT32.min, INT32.max).int()


def integral(coords: torch.Tensor) -> torch.Tensor:
    """Coordinates of any dtype as int32, floored. Raises CoordinateError where they do not fit."""
    if coords.dtype == torch.int32:
        return coords
    integers, floored = _saturated(coords), _floored(coords)
    fits = integers == floored
    if not bool(fits.all()):
        bad = coords[~fits.all(1)][0].tolist()
        raise CoordinateError(
            f"the coordinate {bad} is not finite or leaves 32-bit integers; shift or coarsen the coordinates."
        )
    return integers


class Grid:
    """Distinct coordinates at one tensor stride.

    stride: [D], the tensor stride.  unit: [D], at least 1; every coordinate is a multiple of it.
    lo, hi: bounds of every column, inclusive, not always tight.
    source: how it came to be: "inserted", "strided", "expanded", "pruned", "merged" or "origin".
    layers: output and kernel map of the layers on this map, by kernel.
    origin: of a map that a replay entered, the map that its graph begins with, and the one of the capture.
    field: whose points it has the voxels of.
    """

    origin: tuple[Key, ref[Grid]] | None = None
    field: Key | None = None

    def __init__(
        self,
        coords: torch.Tensor | None,
        stride: tuple[int, ...],
        unit: tuple[int, ...],
        bounds: tuple[tuple[int, ...], tuple[int, ...]],
        source: str,
    ) -> None:
        self._coords, self.stride, self.unit, self.source = coords, stride, unit, source
        self._order = None if coords is None else stream_order.of(coords.device)
        self.lo, self.hi = bounds
        self.layers: dict[KernelSpec, LayerMap] = {}
        self._views: dict[tuple[int, ...], CoordinateMap] = {}
        self._stores: dict[tuple[int, ...], MapStore] = {}

    @staticmethod
    def around(coords: torch.Tensor, stride: tuple[int, ...], source: str) -> Grid:
        """A grid around int32 coordinates [N, 1 + D] as they are. Waits for the device."""
        columns, unit = coords.shape[1], tuple(max(1, t) for t in stride)
        lo, hi = (0,) * columns, (-1,) * columns
        if coords.shape[0]:
            reductions = list(coords.aminmax(dim=0))
            if max(unit) > 1:
                reductions.append((coords[:, 1:] % coords.new_tensor(unit)).any(0).int())
            values = torch.cat(reductions).tolist()  # one wait
            lo, hi = tuple(values[:columns]), tuple(values[columns : 2 * columns])
            if any(values[2 * columns :]):
                unit = (1,) * len(unit)  # the stride is only a label then
        return Grid(coords, stride, unit, (lo, hi), source)

    @staticmethod
    def inserted(
        coords: torch.Tensor, stride: tuple[int, ...], source: str, aligned: bool = False
    ) -> tuple[Grid, torch.Tensor | None, torch.Tensor | None]:
        """A grid of int32 coordinates [N, 1 + D] of which rows may be equal, the row that each of
        its rows was taken from (int64 [U]), and its row of every row (int64 [N]); both None if all
        rows were different. Where layers built maps over earlier inputs, those over this one are
        prepared with one read of the device.

        aligned: all are multiples of the stride. They may be of any dtype then: they are floored.
        Raises: CoordinateError where they do not fit into int32.
        """
        wide, unit = coords, tuple(max(1, t) for t in stride)
        if aligned:
            coords = _saturated(wide)
        if coords.shape[0] and (aligned or max(stride) <= 1):
            rows = Grid.query(coords, unit)
            view = CoordinateMap(rows, DataBounds(rows))
        else:
            grid = Grid.around(coords, stride, source)
            unit = grid.unit
            view = CoordinateMap(Grid.query(coords, unit), grid.box(unit))
        store = MapStore(view)
        if source == "inserted":
            announce(store, view, stride)
        grid = Grid.of_view(view, stride, unit, source, store)
        unique = view.unique
        if aligned and grid._at_an_end():
            integral(wide)
        if unique:
            grid.adopt(coords if aligned else coords.clone(), view)
            return grid, None, None
        fold = view.duplicates()
        grid = Grid(None, stride, unit, (grid.lo, grid.hi), source)
        grid.adopt(coords.index_select(0, fold.first), view.distinct_map())
        return grid, fold.first, fold.inverse

    def _at_an_end(self) -> bool:
        """Whether coordinates reach an end of the range of int32."""
        far = max(self.unit)
        return min(self.lo) <= INT32.min + far or max(self.hi) >= INT32.max - far

    @staticmethod
    def of_layer(
        view: CoordinateMap, stride: tuple[int, ...], unit: tuple[int, ...], source: str, store: MapStore | None = None
    ) -> Grid:
        """`of_view` for coordinates that a layer made. Waits for the device only where bounds leave int32.

        Raises: CoordinateError where a coordinate leaves int32.
        """
        grid = Grid.of_view(view, stride, unit, source, store)
        if min(grid.lo) < INT32.min or max(grid.hi) > INT32.max:
            check_multiples(_reversed(view.coords), unit)
            grid.lo = tuple(max(low, INT32.min) for low in grid.lo)
            grid.hi = tuple(min(high, INT32.max) for high in grid.hi)
        return grid

    @staticmethod
    def of_view(
        view: CoordinateMap, stride: tuple[int, ...], unit: tuple[int, ...], source: str, store: MapStore | None = None
    ) -> Grid:
        """The grid whose view at `unit` is `view`, whose maps `store` holds, if there is one."""
        lo, size = view.box.lo, view.box.size
        low = (lo[0], *(c * u for c, u in zip(lo[:0:-1], unit, strict=True)))
        last = [c + s - 1 for c, s in zip(lo[:0:-1], size[:0:-1], strict=True)]
        high = (lo[0] + size[0] - 1, *(c * u for c, u in zip(last, unit, strict=True)))
        grid = Grid(None, stride, unit, (low, high), source)
        grid._views[unit] = view
        if store is not None:
            grid._stores[unit] = store
        return grid

    def __getstate__(self) -> tuple[object, ...]:
        return (self.coords, self.stride, self.unit, (self.lo, self.hi), self.source)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def coords(self) -> torch.Tensor:
        """int32 [N, 1 + D], batch first, absolute."""
        coords = self._coords
        if coords is None:
            coords = self.absolute(self._views[self.unit].coords)
            self._take(coords)
        elif self._order is not None:
            cached = coords
            self._order.wait(lambda: (cached,))
        return coords

    def absolute(self, view: torch.Tensor) -> torch.Tensor:
        """Coordinates of the grid's own view, int32 [N, 1 + D], as `coords` has them."""
        if _plain(self.unit):
            return _reversed(view)
        return torch.cat([view[:, :1], _multiplied(view[:, 1:].flip(1), self.unit)], 1)

    def _take(self, coords: torch.Tensor | None) -> None:
        """Coordinates that were queued on the current stream."""
        self._order = None if coords is None else stream_order.of(coords.device)
        self._coords = coords

    @property
    def n_rows(self) -> int:
        coords = self._coords
        return self._views[self.unit].n_rows if coords is None else coords.shape[0]

    @property
    def device(self) -> torch.device:
        return self.own_view().device

    @property
    def dimension(self) -> int:
        return len(self.stride)

    def box(self, unit: tuple[int, ...]) -> Box:
        """Bounds of the coordinates divided by `unit` and floored, axes reversed."""
        low = [c // u for c, u in zip(self.lo[1:], unit, strict=True)]
        high = [c // u for c, u in zip(self.hi[1:], unit, strict=True)]
        lo = (self.lo[0], *low[::-1])
        hi = (self.hi[0], *high[::-1])
        return Box.spanning(lo, tuple(max(0, h - c + 1) for c, h in zip(lo, hi, strict=True)))

    def floored(self, step: tuple[int, ...]) -> torch.Tensor:
        """int32 [N, 1 + D]: the coordinates, axes rounded down to multiples of `step`.

        Raises: CoordinateError where one leaves int32.
        """
        coords, axes = self.coords, _divided(self.coords[:, 1:], step)
        if any(low // s * s < INT32.min for low, s in zip(self.lo[1:], step, strict=True)):
            check_multiples(torch.cat([coords[:, :1], axes], 1), step)
        return torch.cat([coords[:, :1], _multiplied(axes, step)], 1)

    def adopt(self, coords: torch.Tensor | None, view: CoordinateMap) -> None:
        """The coordinates (None: those of the view), and their view at the grid's unit."""
        self._views[self.unit] = view
        self._take(coords)

    @staticmethod
    def query(coords: torch.Tensor, unit: tuple[int, ...]) -> torch.Tensor:
        """Absolute integer coordinates as the view at `unit` wants them."""
        if _plain(unit):
            return _reversed(coords)
        return torch.cat([coords[:, :1], _divided(coords[:, 1:], unit).flip(1)], 1)

    def view(self, unit: tuple[int, ...]) -> CoordinateMap:
        """The coordinates in steps of `unit` (a divisor of the grid's own), axes reversed."""
        view = self._views.get(unit)
        if view is None:
            view = CoordinateMap(self.query(self.coords, unit), self.box(unit))
            view.adopt()  # distinct by construction
            self._views[unit] = view
        return view

    def own_view(self) -> CoordinateMap:
        return self.view(self.unit)

    def ask(self, map_request: MapRequest, unit: tuple[int, ...]) -> BuiltMap:
        """The answer to a request over the view at `unit`."""
        store = self._stores.get(unit)
        if store is None:
            store = self._stores[unit] = MapStore(self.view(unit))
        return request(store, self.view(unit), map_request)

    def cells(self, divisor: tuple[int, ...]) -> CoordinateMap:
        """The distinct cells of `divisor` units that hold a coordinate, by their first row."""
        own, out = self.own_view(), product(divisor, self.unit)
        axes = _divided(own.coords[:, 1:], divisor[::-1])
        coarse = CoordinateMap(torch.cat([own.coords[:, :1], axes], 1), self.box(out))
        return coarse.distinct_map()

    def rows_of(self, coords: torch.Tensor) -> torch.Tensor:
        """Row of every absolute integer coordinate [M, 1 + D] that lies on the unit, else -1."""
        return find_rows(self.own_view(), self.query(coords, self.unit))
