"""Operators that build maps, and the coordinates that they are built over.

Coordinates pass through a graph as the tensor that users see and a handle of a `Sites`: a private
copy and the store of all maps over it. A graph may write into the memory of its own tensors once it
needs them no more, so the engine reads the copy only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import state
from ...errors import KernelError, ShapeError, UnsupportedError
from ..maps import map_cache
from ..maps.coordinate_map import CoordinateMap
from ..maps.kernel_map import KernelMap
from ..maps.map_cache import MapStore
from ..ops.row_matrix import RowMatrix
from . import handles
from .library import define

ops: Any = torch.ops.sparse_bridge


class Sites:
    """Coordinates int32 [N, 1 + D] as a framework has them, and the store of the maps over them.

    more: what else an adapter remembers of them.
    """

    def __init__(self, coords: torch.Tensor, store: MapStore, more: Any = None) -> None:
        self.coords, self.store, self.more = coords, store, more


class BuilderResult(NamedTuple):
    """The result of a builder: the map, or what a layer needs instead of one, and the coordinates if
    it made some."""

    kmap: KernelMap | RowMatrix
    sites: Sites | None = None


Builder = Callable[[Sites, Sequence[int]], BuilderResult]
_builders: dict[str, Builder] = {}
_entered: weakref.WeakValueDictionary[Any, Sites] = weakref.WeakValueDictionary()


def register(name: str, builder: Builder) -> None:
    """Have the map operators call `builder` under this name."""
    _builders[name] = builder


def enter(coords: torch.Tensor) -> Sites:
    """The sites of coordinates int32 [N, 1 + D] that come from outside. A tensor that was entered before is compared
    with what it was then: graphs write without changing version counters."""
    store = map_cache.find_store(coords)
    if store is not None:
        return Sites(coords, store)
    key = coords.data_ptr(), tuple(coords.shape), coords.device
    entry = _entered.get(key)
    if entry is None or not torch.equal(entry.coords, coords):
        entry = _entered[key] = Sites(coords.clone(), MapStore(device=coords.device))
    return entry


@state.owns
def reset() -> None:
    """Forget which coordinates were entered."""
    _entered.clear()


def source(coords: torch.Tensor, handle: torch.Tensor, then: int, now: int) -> Sites:
    """The sites behind a handle, unless the visible coordinates were changed in place since: version `then`, `now`.

    coords: int32 [N, 1 + D].  handle: int64 [1] on the CPU. Raises KernelError where the two do not have one shape,
    LifecycleError where the handle is gone.
    """
    if then != now:
        return enter(coords)
    sites = handles.value_of(handle, Sites)
    if sites.coords.shape != coords.shape:
        raise KernelError(
            f"a handle of {sites.coords.shape[0]} coordinates came with {coords.shape[0]}; please "
            "report the graph that did that."
        )
    return sites


def build(sites: Sites, builder: str, numbers: Sequence[int]) -> BuilderResult:
    """The map of a builder over coordinates. Raises UnsupportedError for a builder that is not registered, and what
    the builder raises."""
    entry = _builders.get(builder)
    if entry is None:
        raise UnsupportedError(f"this graph needs maps of {builder}; import sparse_bridge.compile before loading it.")
    return entry(sites, numbers)


def _coordinates(coords: torch.Tensor) -> torch.Tensor:
    return handles.make(enter(coords))


def _map(
    coords: torch.Tensor, handle: torch.Tensor, then: int, now: int, builder: str, numbers: Sequence[int]
) -> torch.Tensor:
    return handles.make(build(source(coords, handle, then, now), builder, numbers).kmap)


def _new_map(
    coords: torch.Tensor, handle: torch.Tensor, then: int, now: int, builder: str, numbers: Sequence[int], least: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kmap, sites = build(source(coords, handle, then, now), builder, numbers)
    assert sites is not None
    check_least(sites, least)
    return handles.make(kmap), sites.coords.clone(), handles.make(sites)


def check_least(sites: Sites, least: int) -> None:
    """Raises ShapeError for fewer rows than a graph serves."""
    check_rows(sites.coords.shape[0], least)


def check_rows(n_rows: int, least: int) -> None:
    """`check_least` of a number of rows. Raises ShapeError."""
    if n_rows < least:
        raise ShapeError(
            f"a layer of a compiled graph made {n_rows} rows; the graph serves "
            f"{least} and more of them. Run scenes as small as this one through the eager model."
        )


def _fake_new_map(
    coords: torch.Tensor, handle: torch.Tensor, then: int, now: int, builder: str, numbers: Sequence[int], least: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_rows = torch.library.get_ctx().new_dynamic_size(min=least)
    return handles.like(), coords.new_empty((n_rows, coords.shape[1])), handles.like()


_MAP_SCHEMA = "Tensor coords, Tensor handle, SymInt then, SymInt now, str builder, SymInt[] numbers"
define("coordinates", "(Tensor coords) -> Tensor", _coordinates, lambda coords: handles.like())
define("map", f"({_MAP_SCHEMA}) -> Tensor", _map, lambda *ignored: handles.like())
define("new_map", f"({_MAP_SCHEMA}, int least) -> (Tensor, Tensor, Tensor)", _new_map, _fake_new_map)


class Traced:
    """Coordinates while a program is traced.

    coords: int32 [N, 1 + D], as users see them.  handle: of the `Sites`, int64 [1] on the CPU.  version: of `coords`
    when both were made.  from_layer: whether a layer made them.
    """

    def __init__(self, coords: torch.Tensor, handle: torch.Tensor, from_layer: bool = False) -> None:
        self.coords, self.handle, self.version = coords, handle, version_of(coords)
        self.from_layer = from_layer

    def map(self, builder: str, numbers: Sequence[int]) -> torch.Tensor:
        """A handle, int64 [1], of the kernel map onto coordinates that are known. Raises UnsupportedError where nobody
        has registered the builder."""
        now = version_of(self.coords)
        kmap: torch.Tensor = ops.map(self.coords, self.handle, self.version, now, builder, numbers)
        return kmap

    def new_map(self, builder: str, numbers: Sequence[int], training: bool) -> tuple[torch.Tensor, Traced]:
        """A handle, int64 [1], of the kernel map onto new coordinates, and those. Raises, when the graph runs,
        ShapeError for fewer rows than `least_rows`."""
        now, least = version_of(self.coords), least_rows(training)
        kmap, coords, handle = ops.new_map(self.coords, self.handle, self.version, now, builder, numbers, least)
        return kmap, Traced(coords, handle, True)


def least_rows(training: bool) -> int:
    """The fewest rows that a graph serves: torch's norms want to know while they are traced."""
    return 2 if training else 1


def entered(coords: torch.Tensor) -> Traced:
    """Coordinates int32 [N, 1 + D] that come from outside of the layers."""
    return Traced(coords, ops.coordinates(coords))


def version_of(coords: torch.Tensor) -> int:
    """A number that changes when a traced program changes coords, int32 [N, 1 + D], in place."""
    return coords._version


def sites_of(cmap: CoordinateMap, store: MapStore) -> Sites:
    """The sites of coordinates that the engine made."""
    return Sites(cmap.coords, store)
