"""Models whose maps are queued as soon as a framework announces an input.

A framework that looks for equal rows when a tensor is made queues a table for that and waits. Where
such tensors have gone to a replayed model, the captured maps of that model show whether rows are equal,
too. They are queued instead, and are ready when the model is called.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Protocol

import torch

from .... import hooks, policy, state
from ...maps.coordinate_map import CoordinateMap
from ...maps.map_cache import MapStore
from ...prefetch import prefetch
from .. import padded
from ..graph_maps import GraphOwner, SpeculativeLaunch

_Category = tuple[torch.device, int, Hashable]


class AnnouncedInputOwner(GraphOwner, Protocol):
    """A model whose graphs may be queued for announced inputs.  speculation: what is queued."""

    speculation: SpeculativeLaunch


class _Announced(threading.local):
    """The coordinates that this thread announced last, and their category: device, columns and name."""

    last: tuple[weakref.ref[torch.Tensor], _Category] | None = None


_announced = _Announced()
_owners: dict[_Category, weakref.ref[AnnouncedInputOwner]] = {}


@state.owns
def forget() -> None:
    """Drop the owners of all categories."""
    _owners.clear()
    _announced.last = None


def announced(store: MapStore, cmap: CoordinateMap, name: Hashable) -> None:
    """Prepare the maps that such inputs need, before the first request: by the graph that will probably
    serve them, else by maps of their own."""
    category = cmap.device, cmap.coords.shape[1], name
    _announced.last = weakref.ref(cmap.coords), category
    reference = _owners.get(category)
    owner = None if reference is None else reference()
    new = cmap.unbounded and padded.current() is None and not hooks.traced()
    if owner is not None and new and owner.speculation.launch_announced(owner, cmap):
        cmap.validate(cmap.n_rows, cmap.n_rows, False)  # the graph has seen that rows are distinct
        return
    prefetch.announced(store, cmap, name)


def replayed(owner: AnnouncedInputOwner, coords: torch.Tensor) -> None:
    """Learn that a replay of `owner` served an input."""
    last = _announced.last
    if last is not None and last[0]() is coords:
        if len(_owners) >= policy.ANNOUNCED_KINDS:
            _owners.clear()
        _owners[last[1]] = weakref.ref(owner)
