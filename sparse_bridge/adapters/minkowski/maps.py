"""The maps of one manager: which map is it, and how do two of them relate. MinkowskiEngine keeps
this in its compiled backend.

A map is known by (tensor stride, string id); layers find their output by that key and nothing else,
which is how a decoder comes back to its encoder's rows. Keys, rows and row order are deterministic:

* inserted: order of the input; of equal coordinates the first row stands for all
* strided: by the first input row that falls into a cell
* expanded, generated: by the first input row that reaches a coordinate, then by kernel offset
* pruned: order of the input.  merged: rows of the first map, then what each further map adds
* origin: ascending batch index
"""

from __future__ import annotations

import itertools
import math
import string
import weakref
from collections.abc import Container
from typing import Any

import torch

from ...core.device.stream_order import StreamCache
from ...core.maps import map_cache
from ...core.maps.kernel_map import KernelMap
from ...core.maps.lookup import merge
from ...core.maps.request import MapRequest
from ...core.ops.row_matrix import RowMatrix
from ...errors import ContractError
from .errors import KeyStateError, StrideError, TensorDeviceError
from .geometry import KernelSpec, Region, cell_region, core_offsets
from .grid import Grid, Key, LayerMap
from .points import FieldMap
from .strides import Stride, check_tensor_stride, common_unit, negated, product, ratio, reached, strided_request

ENTERED = "entered"  # where a coordinate tensor's store tells its manager and key
_LETTERS = string.digits + string.ascii_uppercase
_MOST_CELL_OFFSETS = 64  # above, cells are found by folding equal rows


class MapRegistry:
    """Coordinate maps, fields and kernel maps of one CoordinateManager of dimension D.

    Like upstream's, it evicts nothing: all of it goes when the last tensor that uses it does.
    whole: of an input of a replay, see `has_items_of_one`.
    """

    whole = True

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.device: torch.device | None = None
        self.grids: dict[Key, Grid] = {}
        self.fields: dict[Key, FieldMap] = {}
        # (in, out, region) -> map;  (in, out) -> row of the parent of every row, sums over cells;
        # (key, origin) -> batch item of every row;  (field, key) -> from voxels to points
        self.kernel_maps: dict[tuple[Key, Key, Region], KernelMap] = {}
        self.parents: StreamCache[tuple[Key, Key], torch.Tensor] = StreamCache()
        self.cells: StreamCache[tuple[Key, Key], RowMatrix] = StreamCache()
        self.batch_rows: StreamCache[tuple[Key, Key], torch.Tensor] = StreamCache()
        self.slices: StreamCache[tuple[Key, Key], RowMatrix] = StreamCache()
        self.traced: Any = None  # what compiled graphs know of their own maps
        self._strided: dict[tuple[Key, Stride, str], Key] = {}
        # Number of roots -> batch indices that they have; (key of the origin map, its indices)
        self.batches: StreamCache[int, torch.Tensor] = StreamCache()
        self.origin: tuple[Key, torch.Tensor] | None = None
        self._tags = itertools.count(1)

    def __getstate__(self) -> dict[str, Any]:
        """Coordinates only; everything else is found again."""
        return {
            "dimension": self.dimension,
            "grids": self.grids,
            "fields": self.fields,
            "strided": self._strided,
            "origin": self.origin,
            "tags": next(self._tags),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["dimension"])  # type: ignore[misc]
        self.grids.update(state["grids"])
        self.fields.update(state["fields"])
        self._strided.update(state["strided"])
        self.origin = state["origin"]
        self._tags = itertools.count(state["tags"])
        for grid in self.grids.values():
            self.device = grid.device

    def leave_graph(self) -> None:
        """Take over the maps that a compiled graph made, for layers that run outside of it."""
        if self.traced is not None:
            self.traced.enter(self)

    # keys

    def tag(self) -> str:
        """Five letters that no key of this manager has had."""
        number, base = next(self._tags), len(_LETTERS)
        return "".join(_LETTERS[number // base**digit % base] for digit in range(4, -1, -1))

    def free_key(self, stride: Stride, name: str = "", taken: Container[Key] | None = None) -> Key:
        """(stride, name) if it is not taken (by a map), else with letters of its own."""
        taken = self.grids if taken is None else taken
        key = (stride, name)
        while key in taken:
            key = (stride, f"{name}-{self.tag()}" if name else self.tag())
        return key

    def grid(self, key: Key) -> Grid:
        """The map under `key`. Raises KeyStateError."""
        grid = self.grids.get(key)
        if key is None:
            raise KeyStateError("the coordinate map key is not set.")
        if grid is None and self.traced is not None:
            self.leave_graph()
            grid = self.grids.get(key)
        if grid is None:
            existing = sorted(self.grids)[:8]
            raise KeyStateError(
                f"no coordinate map has the key {key} in this manager (it has {existing}); "
                "keys belong to the manager that made them."
            )
        return grid

    def first_key(self, stride: Stride) -> Key:
        """The first key of a tensor stride. Raises ContractError."""
        keys = sorted(key for key in self.grids if key[0] == stride)
        if not keys:
            raise ContractError(f"no coordinate map has tensor stride {list(stride)}.")
        return keys[0]

    def field(self, key: Key) -> FieldMap:
        """The field under `key`. Raises KeyStateError."""
        if key not in self.fields:
            raise KeyStateError(f"no coordinate field has the key {key} in this manager.")
        return self.fields[key]

    # maps that are given

    def use_device(self, device: torch.device) -> None:
        """Bind the manager to one device. Raises TensorDeviceError for another one."""
        if self.device is None:
            self.device = device
        elif self.device != device:
            raise TensorDeviceError(
                f"coordinates on {device} for a coordinate manager on {self.device}; "
                "build the tensors with device=, one manager serves one device."
            )

    def insert(
        self, coords: torch.Tensor, stride: Stride, name: str = "", source: str = "inserted", aligned: bool = False
    ) -> tuple[Key, torch.Tensor | None, torch.Tensor | None]:
        """Enter coordinates [N, 1 + D] as a new map, see `Grid.inserted`.

        Returns: its key, the row that each of its rows was taken from (int64 [U]), and the map's
        row of every input row (int64 [N]); both None if all rows were different.
        """
        check_tensor_stride(stride)
        self.use_device(coords.device)
        grid, first, inverse = Grid.inserted(coords, stride, source, aligned)
        key = self.free_key(stride, name)
        self.grids[key] = grid
        store = map_cache.find_store(grid.coords) or map_cache.MapStore(device=coords.device)
        store.put(ENTERED, (weakref.ref(self), key))
        map_cache.adopt(grid.coords, store)
        return key, first, inverse

    # maps that follow from others

    def strided(self, key: Key, stride: Stride, name: str = "") -> Key:
        """The map of the cells of size tensor stride * stride; an existing map of that key is it.

        Except one that was made by pruning: that has another tensor's rows, so a new map is made.
        """
        if all(s == 1 for s in stride) and name in ("", key[1]):
            return key
        grid = self.grid(key)
        memo = (key, stride, name)
        if memo in self._strided:
            return self._strided[memo]
        out_stride = product(grid.stride, stride)
        out_key = (out_stride, name or key[1])
        if out_key not in self.grids or self.grids[out_key].source == "pruned":
            make = self._flatten if 0 in out_stride else self._coarsen
            out_key = make(key, grid, self.free_key(*out_key))
        self._strided[memo] = out_key
        return out_key

    def _coarsen(self, key: Key, grid: Grid, out: Key) -> Key:
        """The map of the cells of size `out[0]`; with it comes the kernel map of a kernel as large
        as its stride."""
        divisor = ratio(out[0], grid.unit)
        store = kmap = None
        if math.prod(divisor) > _MOST_CELL_OFFSETS:
            view = grid.cells(divisor)
        else:
            region = cell_region(divisor)
            offsets = core_offsets(region, (1,) * len(divisor))
            map_request = strided_request(negated(offsets), divisor[::-1])
            kmap, cells, store = grid.ask(map_request, grid.unit)
            assert cells is not None
            view = cells
        self.grids[out] = Grid.of_layer(view, out[0], out[0], "strided", store)
        if kmap is not None and grid.unit == grid.stride:
            self.kernel_maps[key, out, region] = kmap
        return out

    def _flatten(self, key: Key, grid: Grid, out: Key) -> Key:
        """The map whose cells reach over all of every axis of tensor stride 0."""
        flat_axes = grid.coords.new_tensor([False, *(s == 0 for s in out[0])], dtype=torch.bool)
        step = tuple(max(1, s) for s in out[0])
        coords = grid.floored(step).masked_fill(flat_axes, 0)
        return self.insert(coords, *out, "strided")[0]

    def expanded(self, key: Key, region: Region, stride: Stride) -> Key:
        """A new map: {u + o * tensor stride} that lie on the coarser grid (expand_coordinates)."""
        grid = self.grid(key)
        out = self.free_key(product(grid.stride, stride))
        scale = ratio(grid.stride, grid.unit)
        divisor = ratio(out[0], grid.unit)[::-1]
        offsets = core_offsets(region, scale)
        _, view, store = grid.ask(strided_request(offsets, divisor), grid.unit)
        assert view is not None
        self.grids[out] = Grid.of_layer(view, out[0], out[0], "expanded", store)
        return out

    def finer_stride(self, key: Key, stride: Stride, exact: bool = True) -> Stride:
        """Tensor stride after a transposed layer, rounded down.

        exact: raise StrideError if it does not divide; upstream's generative layers go on, at last
        with a tensor stride of 0.
        """
        tensor_stride = self.grid(key).stride
        if exact and any(t % s for t, s in zip(tensor_stride, stride, strict=True)):
            raise StrideError(
                f"a transposed layer of stride {list(stride)} on tensor stride "
                f"{list(tensor_stride)}; the stride must divide it."
            )
        return ratio(tensor_stride, stride)

    def generated(self, key: Key, region: Region, stride: Stride) -> Key:
        """A new map: {u + o * finer tensor stride}, and the kernel map to it."""
        grid = self.grid(key)
        fine = self.finer_stride(key, stride, exact=False)
        out = self.free_key(fine)
        aligned = grid.unit == grid.stride
        unit = fine if aligned and 0 not in fine else (1,) * len(fine)
        scale = ratio(fine, unit)
        multiplier = ratio(grid.unit, unit)[::-1]
        offsets = core_offsets(region, scale)
        rule = reached(offsets, multiplier, (1,) * len(unit))
        map_request = MapRequest("generative", offsets, multiplier, rule, "first_seen")
        kmap, view, store = grid.ask(map_request, grid.unit)
        assert view is not None
        self.grids[out] = Grid.of_layer(view, fine, unit, "expanded", store)
        # Kept as the forward map fine -> coarse, like that of a strided layer.
        self.kernel_maps[out, key, region] = kmap.transposed()
        return out

    def pruned(self, key: Key, rows: torch.Tensor) -> Key:
        """A new map of the rows `rows` (int64, ascending)."""
        grid = self.grid(key)
        out = self.free_key(key[0], "pruned")
        coords = grid.coords.index_select(0, rows)
        self.grids[out] = Grid(coords, grid.stride, grid.unit, (grid.lo, grid.hi), "pruned")
        return out

    def merged(self, keys: list[Key]) -> tuple[Key, list[torch.Tensor]]:
        """A new map of the union, and its rows of every map's rows (int64)."""
        grids = [self.grid(key) for key in keys]
        unit = common_unit(*(grid.unit for grid in grids))
        view, rows = merge([grid.view(unit) for grid in grids])
        stride = tuple(min(axis) for axis in zip(*(grid.stride for grid in grids), strict=True))
        out = self.free_key(stride, f"merge-{self.tag()}")
        self.grids[out] = Grid.of_view(view, stride, unit, "merged")
        return out, rows

    # what layers ask for

    def layer_map(self, key: Key, spec: KernelSpec, target: Key | None = None) -> LayerMap:
        """Where a layer on the map `key` writes, and the kernel map to there.

        target: the output map, None for the layer's own.  Raises: KeyStateError, StrideError.
        """
        grid = self.grids.get(key) or self.grid(key)
        if target is None:
            layer_map = grid.layers.get(spec)
            if layer_map is not None:
                return layer_map
        out = self.output_key(key, spec) if target is None else target
        if spec.transposed:
            layer_map = LayerMap(out, self.relation(out, key, spec.region).transposed())
        else:
            layer_map = LayerMap(out, self.relation(key, out, spec.region))
        if target is None and not spec.expand:
            grid.layers[spec] = layer_map
        return layer_map

    def output_key(self, key: Key, spec: KernelSpec) -> Key:
        """Where a layer without a given map writes. A forward one: to the map of its stride; a
        transposed one: to the map known at the finer stride, or a new one. With `expand`: to a new
        one always."""
        if not spec.transposed:
            if spec.expand:
                return self.expanded(key, spec.region, spec.stride)
            return self.strided(key, spec.stride)
        if not spec.expand:
            if not spec.strided:
                return key
            finer_key = (self.finer_stride(key, spec.stride), "")
            if finer_key in self.grids:
                return finer_key
        return self.generated(key, spec.region, spec.stride)

    def relation(self, in_key: Key, out_key: Key, region: Region) -> KernelMap:
        """y[u] gathers x[u + o * tensor stride of the input], for every offset o of the region."""
        memo = (in_key, out_key, region)
        kmap = self.kernel_maps.get(memo)
        if kmap is None:
            kmap = _related(self.grid(in_key), self.grid(out_key), region)
            self.kernel_maps[memo] = kmap
        return kmap

    def parent_rows(self, in_key: Key, out_key: Key) -> torch.Tensor:
        """int64 [N_in]: the row of `out_key` whose cell holds each row of `in_key`, -1 for none.

        Raises: StrideError if the tensor strides do not divide.
        """
        rows = self.parents.get((in_key, out_key))
        if rows is None:
            x, y = self.grid(in_key), self.grid(out_key)
            if any(b == 0 or (a and b % a) for a, b in zip(x.stride, y.stride, strict=True)):
                raise StrideError(
                    f"tensor strides {list(x.stride)} and {list(y.stride)}; the second must be a multiple of the first."
                )
            rows = y.rows_of(x.coords if y.unit == y.stride else x.floored(y.stride))
            self.parents.put((in_key, out_key), rows, x.device)
        return rows


def _related(x: Grid, y: Grid, region: Region) -> KernelMap:
    unit = x.unit if x is y else common_unit(x.unit, y.unit)
    offsets = core_offsets(region, ratio(x.stride, unit))
    if x is y:
        return x.ask(MapRequest("submanifold", offsets), unit).kmap
    stride = ratio(y.unit, unit)[::-1]
    return x.ask(MapRequest("between", offsets, stride, y.own_view()), unit).kmap
