"""What a graph knows of the maps of a manager, and the operators that enter coordinates."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ....core.compile import coordinates, handles
from ....core.compile.coordinates import Sites, Traced
from ....core.compile.library import define
from ....core.maps.map_cache import MapStore
from ....errors import ContractError, LifecycleError, ShapeError, UnsupportedError
from ..grid import Key
from ..maps import ENTERED, MapRegistry
from ..upstream.enums import SparseTensorQuantizationMode

ops: Any = torch.ops.sparse_bridge
SCHEMA = "Tensor coords, Tensor handle, SymInt then, SymInt now, int[] stride"


class RegisteredMap:
    """A coordinate map of a manager, by its key.

    own: the manager is one that a graph made, and lives as long as its coordinates. Another is the
    user's, who holds handles of these coordinates: as a handle's memory owns what it stands for,
    and no collector sees through it, both would keep each other alive for ever.
    """

    __slots__ = ("_own", "_registry", "key")

    def __init__(self, registry: MapRegistry, key: Key, own: bool) -> None:
        self._registry, self._own, self.key = weakref.ref(registry), registry if own else None, key

    @property
    def registry(self) -> MapRegistry:
        """The manager. Raises LifecycleError where the user's is gone."""
        registry = self._registry()
        if registry is None:
            raise LifecycleError(
                "a compiled graph was called with coordinates of a manager that is gone; hold the "
                "SparseTensor, or its coordinate_manager, as long as you use what was made of it."
            )
        return registry

    def with_key(self, key: Key) -> RegisteredMap:
        """Another map of the same manager."""
        return RegisteredMap(self.registry, key, self._own is not None)


class GraphMaps:
    """What a graph knows of a manager's maps. sites: coordinates by key.  pruned: keys of maps that
    pruning made.  strided: the coarser map of a map, by stride.  origin: key of the origin map.
    maps: handles of the kernel maps so far.
    """

    def __init__(self) -> None:
        self.sites: dict[Key, Traced] = {}
        self.pruned: dict[Key, bool] = {}
        self.strided: dict[tuple[Key, tuple[int, ...]], Key] = {}
        self.origin: Key | None = None
        self.maps: dict[tuple[Key, Key, tuple[int, ...]], torch.Tensor] = {}

    def free_key(self, stride: tuple[int, ...], name: str = "") -> Key:
        """As `MapRegistry.free_key`."""
        if (stride, name) not in self.sites:
            return stride, name
        return stride, f"{name}-{len(self.sites)}"

    def enter(self, registry: MapRegistry) -> None:
        """Give the manager itself the maps, once the graph has run."""
        for key, sites in self.sites.items():
            if key not in registry.grids:
                entered = registered_map(*flatten(sites, key))
                registry.use_device(sites.coords.device)
                registry.grids[key] = entered.registry.grid(entered.key)


def graph_of(registry: MapRegistry) -> GraphMaps:
    """What the graph knows of this manager, from now on."""
    if registry.traced is None:
        registry.traced = GraphMaps()
    graph: GraphMaps = registry.traced
    return graph


def traced_sites(registry: MapRegistry, key: Key) -> Traced | None:
    """The coordinates of a map; None for a second map that was made outside of the graph, of which
    the graph would not know how it belongs to the first."""
    graph: GraphMaps | None = registry.traced
    if graph is not None and key in graph.sites:
        return graph.sites[key]
    if graph is not None or key not in registry.grids:
        return None
    sites = graph_of(registry).sites
    sites[key] = coordinates.entered(registry.grids[key].coords)
    return sites[key]


def all_traced(registry: MapRegistry, keys: Iterable[Key]) -> bool:
    """Whether the graph knows all of these maps."""
    return all(traced_sites(registry, key) is not None for key in keys)


def coords_of(registry: MapRegistry, key: Key) -> torch.Tensor | None:
    """The coordinates of a map that the graph made, as users see them."""
    graph: GraphMaps | None = registry.traced
    return graph.sites[key].coords if graph is not None and key in graph.sites else None


def flatten(sites: Traced, key: Key) -> tuple[Any, ...]:
    """The coordinates of a map as arguments of an operator, see `SCHEMA`."""
    now = coordinates.version_of(sites.coords)
    return sites.coords, sites.handle, sites.version, now, list(key[0])


def registered_map(
    coords: torch.Tensor, handle: torch.Tensor, then: int, now: int, stride: Sequence[int]
) -> RegisteredMap:
    """The map of the coordinates that `flatten` returned."""
    return map_of_sites(coordinates.source(coords, handle, then, now), tuple(stride))


def map_of_sites(sites: Sites, stride: tuple[int, ...]) -> RegisteredMap:
    """The map of `sites`: in the manager that they were entered in before the graph; coordinates
    that a graph sees first become a manager of their own."""
    if sites.more is None:
        entry = sites.store.peek(ENTERED)
        registry = None if entry is None else entry[0]()
        if registry is not None and entry[1][0] == stride:
            sites.more = RegisteredMap(registry, entry[1], own=False)
    if sites.more is None:
        registry = MapRegistry(len(stride))
        key, first, _ = registry.insert(sites.coords, stride)
        if first is not None:
            raise ContractError("coordinates of a compiled layer repeat; they must be distinct.")
        sites.more = RegisteredMap(registry, key, own=True)
    registered: RegisteredMap = sites.more
    return registered


def together(maps: Sequence[RegisteredMap]) -> MapRegistry:
    """The manager of several maps. Raises ContractError where a program wrote into coordinates."""
    registry = maps[0].registry
    if any(other.registry is not registry for other in maps):
        raise ContractError(
            "a compiled layer got maps of two coordinate managers, because the program changed the "
            "coordinates of one in place; make a new SparseTensor of such coordinates."
        )
    return registry


def wrap(registered: RegisteredMap) -> Sites:
    """The sites of a map that a layer made, for the graph."""
    coords = registered.registry.grid(registered.key).coords
    return Sites(coords, MapStore(device=coords.device), registered)


def as_results(sites: Sites, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(coordinates, handle) as operators return them. Raises ShapeError for fewer than `least`."""
    coordinates.check_least(sites, least)
    return sites.coords.clone(), handles.make(sites)


def _insert(coords: torch.Tensor, stride: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    registry = MapRegistry(coords.shape[1] - 1)
    key, first, _ = registry.insert(coords, tuple(stride))
    if first is None:
        first = torch.arange(coords.shape[0], device=coords.device)
    if first.shape[0] < 2:
        raise ShapeError(
            f"a compiled graph got {first.shape[0]} distinct coordinates; it serves 2 and more. "
            "Run scenes as small as this one through the eager model."
        )
    return first, *as_results(wrap(RegisteredMap(registry, key, own=True)), 2)


def _fake_insert(coords: torch.Tensor, stride: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_rows = torch.library.get_ctx().new_dynamic_size(min=2)
    first = coords.new_empty(n_rows, dtype=torch.int64)
    return first, coords.new_empty((n_rows, coords.shape[1])), handles.like()


define("minkowski_insert", "(Tensor coords, int[] stride) -> (Tensor, Tensor, Tensor)", _insert, _fake_insert)


def inserted(x: Any, features: torch.Tensor, coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, coordinates) of a tensor made in a graph: of equal coordinates the first row.

    Raises UnsupportedError for other modes of quantisation, and for a second map.
    """
    if x.quantization_mode is not SparseTensorQuantizationMode.RANDOM_SUBSAMPLE:
        raise UnsupportedError(
            f"a SparseTensor with {x.quantization_mode} is made in a compiled graph; make it "
            "outside, or use RANDOM_SUBSAMPLE."
        )
    registry, key = x._manager._manager, x.coordinate_map_key._key
    if registry.traced is not None:
        raise UnsupportedError(
            "a compiled graph makes a second SparseTensor in one coordinate manager; make it "
            "outside, or from the coordinate_map_key of the first."
        )
    first, coords, handle = ops.minkowski_insert(coords, list(key[0]))
    graph_of(registry).sites[key] = Traced(coords, handle, True)
    return features.index_select(0, first), coords
