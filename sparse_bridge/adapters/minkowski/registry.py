"""The coordinate maps of one manager, by key: what MinkowskiEngine keeps in its compiled backend.

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
import string
from typing import Any

import torch

from ...core.geometry.boxes import Box
from ...core.maps import map_builder
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.merge import merge
from ...core.ops.row_matrix import RowMatrix
from ...errors import ContractError
from .errors import KeyStateError, StrideError, TensorDeviceError
from .fields import FieldMap
from .geometry import Region, core_offsets
from .grid import Grid, common_unit

__all__ = ["Key", "MapRegistry"]

Key = tuple[tuple[int, ...], str]
_LETTERS = string.digits + string.ascii_uppercase


class MapRegistry:
    """Coordinate maps, fields and kernel maps of one CoordinateManager of dimension D.

    Like upstream's, it evicts nothing: all of it goes when the last tensor that uses it does.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.device: torch.device | None = None
        self.grids: dict[Key, Grid] = {}
        self.fields: dict[Key, FieldMap] = {}
        # (in, out, region) -> map;  (in, out) -> row of the parent of every row, sums over cells;
        # (key, origin) -> batch item of every row;  (field, key) -> from voxels to points
        self.kernel_maps: dict[tuple[Key, Key, Region], KernelMap] = {}
        self.parents: dict[tuple[Key, Key], torch.Tensor] = {}
        self.cells: dict[tuple[Key, Key], RowMatrix] = {}
        self.batch_rows: dict[tuple[Key, Key], torch.Tensor] = {}
        self.slices: dict[tuple[Key, Key], RowMatrix] = {}
        self._strided: dict[tuple[Key, tuple[int, ...], str], Key] = {}
        self._batches: tuple[int, torch.Tensor] | None = None
        self._origin: Key | None = None
        self._tags = itertools.count(1)

    def __getstate__(self) -> dict[str, Any]:
        """Coordinates only; everything else is found again."""
        return {
            "dimension": self.dimension, "grids": self.grids, "fields": self.fields,
            "strided": self._strided, "origin": self._origin, "tags": next(self._tags),
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["dimension"])  # type: ignore[misc]
        self.grids.update(state["grids"])
        self.fields.update(state["fields"])
        self._strided.update(state["strided"])
        self._origin = state["origin"]
        self._tags = itertools.count(state["tags"])
        for grid in self.grids.values():
            self.device = grid.coords.device

    # keys

    def _tag(self) -> str:
        """Five letters that no key of this manager has had."""
        number, letters = next(self._tags), []
        for _ in range(5):
            number, digit = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[digit])
        return "".join(reversed(letters))

    def free_key(self, stride: tuple[int, ...], name: str = "") -> Key:
        """(stride, name) if no map has it, else with letters of its own."""
        key = (stride, name)
        while key in self.grids:
            key = (stride, f"{name}-{self._tag()}" if name else self._tag())
        return key

    def grid(self, key: Key) -> Grid:
        """The map under `key`. Raises KeyStateError."""
        found = self.grids.get(key)
        if found is None:
            known = sorted(self.grids)[:8]
            raise KeyStateError(
                f"no coordinate map has the key {key} in this manager (it has {known}); "
                "keys belong to the manager that made them."
            )
        return found

    def first_key(self, stride: tuple[int, ...]) -> Key:
        """The first key of a tensor stride. Raises ContractError."""
        found = sorted(key for key in self.grids if key[0] == stride)
        if not found:
            raise ContractError(f"no coordinate map has tensor stride {list(stride)}.")
        return found[0]

    def free_field_key(self, stride: tuple[int, ...], name: str = "") -> Key:
        """`free_key` among the fields."""
        key = (stride, name)
        while key in self.fields:
            key = (stride, f"{name}-{self._tag()}" if name else self._tag())
        return key

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
        self, coords: torch.Tensor, stride: tuple[int, ...], name: str = ""
    ) -> tuple[Key, torch.Tensor | None, torch.Tensor]:
        """Enter int32 coordinates [N, 1 + D] as a new map.

        Returns: its key, the row that each of its rows was taken from (int64 [U]; None if all were
        different), and the map's row of every input row (int64 [N]).
        """
        self.use_device(coords.device)
        grid, unit = _given(coords, stride)
        view = CoordinateMap(grid.query(coords, unit), grid.box(unit))
        first: torch.Tensor | None = None
        if view.unique:
            inverse = torch.arange(coords.shape[0], device=coords.device)
            grid.coords = coords.clone()
            grid._views[unit] = view
        else:
            fold = view.duplicates()
            first, inverse = fold.first, fold.inverse
            grid.coords = coords.index_select(0, first)
            grid._views[unit] = fold.map
        key = self.free_key(stride, name)
        self.grids[key] = grid
        return key, first, inverse

    # maps that follow from others

    def strided(self, key: Key, stride: tuple[int, ...], name: str = "") -> Key:
        """The map of the cells of size tensor stride * stride; an existing map of that key is it.

        Except one that was made by pruning: that has another tensor's rows, so a new map is made.
        """
        if all(s == 1 for s in stride) and name in ("", key[1]):
            return key
        grid = self.grid(key)
        memo = (key, stride, name)
        if memo in self._strided:
            return self._strided[memo]
        if 0 in grid.stride:
            raise StrideError(
                f"a stride of {list(stride)} on tensor stride {list(grid.stride)}; "
                "a globally pooled tensor cannot be strided."
            )
        out_stride = tuple(t * s for t, s in zip(grid.stride, stride, strict=True))
        found = (out_stride, name or key[1])
        if found not in self.grids or self.grids[found].made == "pruned":
            found = self._coarsen(key, grid, self.free_key(*found))
        self._strided[memo] = found
        return found

    def _coarsen(self, key: Key, grid: Grid, out: Key) -> Key:
        divisor = tuple(t // u for t, u in zip(out[0], grid.unit, strict=True))
        coarse = grid.coarse_view(divisor)
        if coarse.unique:
            parents = torch.arange(grid.n_rows, device=grid.coords.device)
        else:
            fold = coarse.duplicates()
            coarse, parents = fold.map, fold.inverse
        self.grids[out] = Grid.of_view(coarse, out[0], out[0], "strided")
        self.parents[key, out] = parents
        return out

    def expanded(self, key: Key, region: Region, stride: tuple[int, ...]) -> Key:
        """A new map: {u + o * tensor stride} that lie on the coarser grid (expand_coordinates)."""
        grid = self.grid(key)
        out = self.free_key(tuple(t * s for t, s in zip(grid.stride, stride, strict=True)))
        scale = tuple(t // u for t, u in zip(grid.stride, grid.unit, strict=True))
        divisor = tuple(t // u for t, u in zip(out[0], grid.unit, strict=True))[::-1]
        offsets = core_offsets(region, scale)
        box = _reached(grid.own_view().box, offsets.values, (1,) * len(divisor), divisor)
        view = map_builder.expanded(grid.own_view(), offsets, divisor, box)
        self.grids[out] = Grid.of_view(view, out[0], out[0], "expanded")
        return out

    def finer_stride(self, key: Key, stride: tuple[int, ...]) -> tuple[int, ...]:
        """Tensor stride after a transposed layer. Raises StrideError if it does not divide."""
        tensor_stride = self.grid(key).stride
        if any(t % s for t, s in zip(tensor_stride, stride, strict=True)):
            raise StrideError(
                f"a transposed layer of stride {list(stride)} on tensor stride "
                f"{list(tensor_stride)}; the stride must divide it."
            )
        return tuple(t // s for t, s in zip(tensor_stride, stride, strict=True))

    def generated(self, key: Key, region: Region, stride: tuple[int, ...]) -> Key:
        """A new map: {u + o * finer tensor stride}, and the kernel map to it."""
        grid = self.grid(key)
        fine = self.finer_stride(key, stride)
        out = self.free_key(fine)
        aligned = grid.unit == grid.stride
        unit = fine if aligned and 0 not in fine else (1,) * len(fine)
        scale = tuple(t // u for t, u in zip(fine, unit, strict=True))
        multiplier = tuple(g // u for g, u in zip(grid.unit, unit, strict=True))[::-1]
        offsets = core_offsets(region, scale)
        box = _reached(grid.own_view().box, offsets.values, multiplier, (1,) * len(unit))
        view, kmap = map_builder.generative(grid.own_view(), offsets, multiplier, box)
        self.grids[out] = Grid.of_view(view, fine, unit, "expanded")
        # Kept as the forward map fine -> coarse, like that of a strided layer.
        self.kernel_maps[out, key, region] = kmap.transposed()
        return out

    def pruned(self, key: Key, rows: torch.Tensor) -> Key:
        """A new map of the rows `rows` (int64, ascending)."""
        grid = self.grid(key)
        out = self.free_key(key[0], "pruned")
        coords = grid.coords.index_select(0, rows)
        self.grids[out] = Grid(coords, grid.stride, grid.unit, grid.lo, grid.hi, "pruned")
        return out

    def merged(self, keys: list[Key]) -> tuple[Key, list[torch.Tensor]]:
        """A new map of the union, and its rows of every map's rows (int64)."""
        grids = [self.grid(key) for key in keys]
        unit = common_unit(*(grid.unit for grid in grids))
        view, rows = merge([grid.view(unit) for grid in grids])
        stride = tuple(min(axis) for axis in zip(*(grid.stride for grid in grids), strict=True))
        out = self.free_key(stride, f"merge-{self._tag()}")
        self.grids[out] = Grid.of_view(view, stride, unit, "merged")
        return out, rows

    def batches(self) -> torch.Tensor:
        """Batch indices that were inserted, as maps or fields: int64, ascending."""
        roots = [grid for grid in self.grids.values() if grid.made == "inserted"]
        count = len(roots) + len(self.fields)
        if self._batches is None or self._batches[0] != count:
            parts = [grid.batches() for grid in roots]
            parts += [field.batches() for field in self.fields.values()]
            found = torch.unique(torch.cat(parts)) if parts else torch.empty(0, dtype=torch.int64)
            self._batches = (count, found)
        return self._batches[1]

    def origin(self) -> Key:
        """The map with one row (b, 0, .., 0) per batch index that was inserted, ascending."""
        batches = self.batches()
        if self._origin is not None:
            grid = self.grids[self._origin]
            if grid.batches() is batches or torch.equal(grid.batches(), batches):
                return self._origin
        key = self.free_key((0,) * self.dimension)
        coords = batches.new_zeros((len(batches), self.dimension + 1), dtype=torch.int32)
        coords[:, 0] = batches
        self.grids[key] = _given(coords, key[0], "origin")[0]
        self._origin = key
        return key


def _given(
    coords: torch.Tensor, stride: tuple[int, ...], made: str = "inserted"
) -> tuple[Grid, tuple[int, ...]]:
    """A grid around coordinates as they are, and its unit."""
    columns = coords.shape[1]
    if coords.shape[0]:
        lo, hi = torch.stack([coords.amin(0), coords.amax(0)]).tolist()
    else:
        lo, hi = [0] * columns, [-1] * columns
    unit = tuple(max(1, t) for t in stride)
    if any(u > 1 for u in unit) and bool((coords[:, 1:] % coords.new_tensor(unit)).any()):
        unit = (1,) * len(unit)  # the stride is only a label then
    return Grid(coords, stride, unit, tuple(lo), tuple(hi), made), unit


def _reached(
    box: Box,
    offsets: tuple[tuple[int, ...], ...],
    multiplier: tuple[int, ...],
    divisor: tuple[int, ...],
) -> Box:
    """Bounds of (c * multiplier + o) / divisor for the coordinates of `box`."""
    lo, size = [box.lo[0]], [box.size[0]]
    for axis, (m, d) in enumerate(zip(multiplier, divisor, strict=True)):
        along = [offset[axis] for offset in offsets]
        low, extent = box.lo[axis + 1], box.size[axis + 1]
        first = -(-(low * m + min(along)) // d)
        last = ((low + extent - 1) * m + max(along)) // d
        lo.append(first)
        size.append(max(0, last - first + 1) if extent else 0)
    return Box.spanning(tuple(lo), tuple(size))
