"""Coordinates with any number of batch columns and axes, as the engine takes them.

A row is (batch columns, D coordinates). The engine knows one batch column: further ones are axes
along which kernels do not reach, and where there is none, one of zeros is put in front.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.geometry.boxes import Box
from ...core.geometry.offsets import Offsets
from ...core.maps.coordinate_map import CoordinateMap
from ...core.maps.kernel_map import KernelMap
from ...core.maps.map_cache import MapStore, store_of
from ...core.maps.request import MapRequest, request
from .. import providers  # noqa: F401 - maps are prefetched
from .arguments import Ints, check_tensors
from .errors import ArgumentShapeError, ArgumentTypeError, ArgumentValueError
from .geometry import bounds_of, box_of, row_major

Deltas = tuple[Ints, ...]


class Lattice(NamedTuple):
    """coords: of the user, int32 [N, batch columns + D].  rows: of the engine, int32 [N, 1 + A].
    dimension: D.  box: the cells that count.  store: of the maps over these coordinates."""

    coords: torch.Tensor
    rows: torch.Tensor
    dimension: int
    box: Box
    store: MapStore

    @property
    def n_batch(self) -> int:
        """Batch columns."""
        return self.coords.shape[1] - self.dimension

    @property
    def sizes(self) -> Ints:
        """Sizes of the batch columns and axes."""
        return self.box.size[1:] if self.n_batch == 0 else self.box.size

    def map(self) -> CoordinateMap:
        return self.store.coordinates(self.rows, self.box)

    def offsets(self, deltas: Deltas) -> Offsets:
        """Kernel offsets [V, D] of the engine's axes."""
        return _padded(deltas, self.box.dimension - self.dimension)

    def steps(self, stride: Ints) -> Ints:
        return (1,) * (self.box.dimension - self.dimension) + stride


@functools.lru_cache(maxsize=1024)
def _padded(deltas: Deltas, n_more: int) -> Offsets:
    return Offsets.of([(0,) * n_more + delta for delta in deltas])


def lattice(coords: torch.Tensor, dimension: int, sizes: Sequence[int] | None, caller: str) -> Lattice:
    """sizes: of the batch columns and axes; None: the bounds of the coordinates.

    Raises: ArgumentShapeError, ArgumentTypeError, ArgumentValueError.
    """
    columns_of(coords, dimension, caller)
    if coords.dtype != torch.int32:
        raise ArgumentTypeError(f"{caller} got coordinates of {coords.dtype}; expected torch.int32 (use .int()).")
    if sizes is None:
        return of_box(coords, dimension, None)
    numbers = [int(size) for size in sizes]
    if len(numbers) != coords.shape[1] or min(numbers) < 0:
        raise ArgumentValueError(
            f"{caller} got sizes {numbers} for coordinates of {coords.shape[1]} columns; expected "
            "one size per column, none negative."
        )
    if coords.shape[1] == dimension:
        numbers = [1, *numbers]
    return of_box(coords, dimension, box_of(numbers[0], numbers[1:]))


def of_box(coords: torch.Tensor, dimension: int, box: Box | None) -> Lattice:
    """`lattice` of checked coordinates.  box: the cells that count; None: the bounds."""
    store, rows = store_of(coords), coords
    if coords.shape[1] == dimension:
        rows = store.get("rows", lambda: torch.nn.functional.pad(coords.detach(), (1, 0)))
    return Lattice(coords, rows, dimension, _bounds(store, rows) if box is None else box, store)


def columns_of(coords: torch.Tensor, dimension: int, caller: str) -> int:
    """How many columns coordinates of `dimension` axes have. Raises ArgumentTypeError,
    ArgumentShapeError."""
    check_tensors(caller, coords=coords)
    if coords.ndim != 2 or coords.shape[1] < dimension:
        raise ArgumentShapeError(
            f"{caller} got coordinates of shape {list(coords.shape)}; expected [N, batch columns + {dimension}]."
        )
    return coords.shape[1]


def _bounds(store: MapStore, rows: torch.Tensor) -> Box:
    if store.root is not None and store.root.coords.shape == rows.shape:
        return store.root.box
    box: Box = store.get(("bounds", rows.shape[1]), lambda: bounds_of(rows))
    return box


def submanifold_map(own: Lattice, deltas: Deltas) -> KernelMap:
    """y[q] gathers x[q + delta]; rows outside of the box meet themselves alone."""
    map_request = MapRequest("submanifold", own.offsets(deltas), box=own.box)
    return request(own.store, own.map, map_request).kmap


def between(fine: Lattice, coarse: Lattice, deltas: Deltas, stride: Ints) -> KernelMap:
    """coarse[q] gathers fine[q * stride + delta]."""
    map_request = MapRequest("between", fine.offsets(deltas), fine.steps(stride), coarse.map(), box=fine.box)
    return request(fine.store, fine.map, map_request).kmap


def made_by(own: Lattice, map_type: str, deltas: Deltas, stride: Ints, extents: Ints) -> Lattice:
    """The output coordinates that `own` reaches, ascending.

    map_type: "strided", q where own[q * stride + delta] exists; "generative", q * stride + delta of
    every q of `own`.  extents: of the output's axes.
    """
    size = (*own.box.size[: own.box.dimension + 1 - own.dimension], *extents)
    box = box_of(size[0], size[1:])
    offsets, steps = own.offsets(deltas), own.steps(stride)

    def build() -> tuple[torch.Tensor, torch.Tensor, MapStore]:
        map_request = MapRequest(map_type, offsets, steps, box, "first_seen", own.box)
        reached: Any = request(own.store, own.map, map_request).coords
        new = CoordinateMap(row_major(reached.coords, box), box)
        new.adopt()
        store = MapStore(new)
        if own.n_batch:
            alias = store.alias(new.coords)
            return alias, alias, store
        coords = new.coords[:, 1:].contiguous()
        mine = store_of(coords)
        mine.put("rows", new.coords)
        mine.put(box, new)
        return coords, new.coords, mine

    key = "made", map_type, offsets, steps, box, own.box
    coords, rows, store = own.store.get(key, build, lambda level: level[0])
    return Lattice(coords, rows, own.dimension, box, store)
