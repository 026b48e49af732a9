"""Maps of an index tensor, shared by the layers that see the same tensor and gone when those are.

A store belongs to a coordinate tensor object. For tensors that an adapter made (outputs of layers)
the tensor keeps its store alive; for the user's own tensors the store is only remembered as long as
some map, record or output uses it, so a data set held on the GPU does not drag hash tables along.
In-place changes of the coordinates are seen through torch's version counter and start a new store.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import state
from ..device import stream_order
from ..geometry.boxes import Box
from .coordinate_map import CoordinateMap


class MapStore:
    """Coordinate and kernel maps over one set of coordinates, by geometry.

    recording: what a provider knows of the input that the coordinates descend from, see `request`.
    """

    __slots__ = ("__weakref__", "_alias", "_lock", "_maps", "_order", "_shown", "recording", "root")

    def __init__(self, root: CoordinateMap | None = None, device: torch.device | None = None) -> None:
        """root: the coordinates, where this package made them.  device: of what is kept here, where
        that is not the root's; None: what is kept is used on one stream."""
        self.root = root
        device = device if root is None else root.device
        self._order = None if device is None else stream_order.of(device)
        self._maps: dict[Hashable, Any] = {}
        self._shown: dict[Hashable, tuple[torch.Tensor, int]] = {}
        self._lock = threading.RLock()
        self._alias: weakref.ref[torch.Tensor] | None = None
        self.recording: Any = None

    def get(
        self, key: Hashable, build: Callable[[], Any], shown: Callable[[Any], torch.Tensor | None] = lambda value: None
    ) -> Any:
        """The map under `key`, built by the first who asks.

        shown: a tensor of it (any shape and dtype) whose memory users see, in outputs of layers, or None. Once they
        have changed it in place, the map is built again.
        """
        built = self.peek(key)
        if built is None:
            with self._lock:
                built = self.peek(key)
                if built is None:
                    self.put(key, built := build())
                    if (exposed := shown(built)) is not None:
                        self._shown[key] = exposed, version_of(exposed)
        return built

    def coordinates(self, coords: torch.Tensor, box: Box) -> CoordinateMap:
        """The coordinate map of `coords` int32 [N, 1 + D] in `box`. Raises: what `CoordinateMap` does."""
        if self.root is not None and self.root.box is box:
            return self.root
        cmap: CoordinateMap = self.get(box, lambda: CoordinateMap(coords, box))
        return cmap

    def find(self, box: Box) -> CoordinateMap | None:
        """The coordinate map in `box`; None where there is none."""
        if self.root is not None and self.root.box is box:
            return self.root
        cmap: CoordinateMap | None = self.peek(box)
        return cmap

    def alias(self, coords: torch.Tensor) -> torch.Tensor:
        """A tensor object over the same coordinates, int32 [N, 1 + D], that keeps this store alive; the same one
        while it lives. It shares their memory, but is a copy of an inference tensor."""
        alias = None if self._alias is None else self._alias()
        if alias is None:
            alias = normal_tensor(coords.clone if coords.is_inference() else coords.detach)
            adopt(alias, self)
            self._alias = weakref.ref(alias)  # a strong one would close a cycle through `_stores`
        return alias

    def put(self, key: Hashable, value: Any) -> None:
        """Keep a map that was queued on the current stream, in place of an earlier one."""
        if self._order is not None:
            self._order.wait()
            self._order.queued()
        self._maps[key] = value

    def peek(self, key: Hashable) -> Any:
        """The map under `key` if there is one, and nobody wrote to what it shows, else None."""
        value = self._maps.get(key)
        if self._shown and (exposed := self._shown.get(key)) and version_of(exposed[0]) != exposed[1]:
            return None
        if value is not None and self._order is not None:
            self._order.wait()
        return value


def version_of(coords: torch.Tensor) -> int:
    """Changes with every change in place; 0 of inference tensors, of which users get copies."""
    return 0 if coords.is_inference() else coords._version


_stores: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()


def _stamp(coords: torch.Tensor) -> tuple[int, ...] | None:
    """Changes when the coordinates do; None for inference tensors, whose changes cannot be seen."""
    if coords.is_inference():
        return None
    return coords._version, coords.data_ptr(), coords.shape[0]


def store_of(coords: torch.Tensor) -> MapStore:
    """The store of a coordinate or index tensor (any shape and dtype): a new one if it has none, was changed in
    place since, or is an inference tensor, whose changes cannot be seen."""
    stamp = _stamp(coords)
    if stamp is None:
        return MapStore(device=coords.device)
    with _lock:
        store = _store_for(coords, stamp)
        if store is None:
            store = MapStore(device=coords.device)
            _stores[coords] = (stamp, weakref.ref(store))
        return store


def _store_for(coords: torch.Tensor, stamp: tuple[int, ...]) -> MapStore | None:
    entry = _stores.get(coords)
    if entry is None or entry[0] != stamp:
        return None
    store: MapStore | None = entry[1]() if isinstance(entry[1], weakref.ref) else entry[1]
    return store


def find_store(coords: torch.Tensor) -> MapStore | None:
    """The store of a coordinate or index tensor (any shape and dtype) if it has one and was not changed in place
    since, else None. Inference tensors have none."""
    stamp = _stamp(coords)
    with _lock:
        return None if stamp is None else _store_for(coords, stamp)


def adopt(coords: torch.Tensor, store: MapStore) -> None:
    """Tie `store` to a coordinate or index tensor (any shape and dtype) that this package made: it lives as long as
    the tensor. Nothing is done for inference tensors."""
    stamp = _stamp(coords)
    if stamp is not None:
        with _lock:
            _stores[coords] = (stamp, store)


def count() -> int:
    """Coordinate tensors of which stores are known."""
    return len(_stores)


@state.owns
def reset() -> None:
    """Forget which store a coordinate tensor has: its maps are built again."""
    with _lock:
        _stores.clear()


def normal_tensor(build: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run `build` so that its result, of any shape and dtype, has a version counter even under
    `torch.inference_mode()`."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return build()
    return build()
