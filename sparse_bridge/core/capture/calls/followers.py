"""Who is given the inputs that a framework announces: its maps are queued at once.

A framework that looks for equal rows when a tensor is made queues a table for that and waits. Where
tensors of its kind went to a model that is replayed, the model's captured maps tell the same: they
are queued instead, and are there when the model is called.
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
from .. import padded, prefetch
from ..graph_maps import Early, GraphOwner

_Kind = tuple[torch.device, int, Hashable]


class Follower(GraphOwner, Protocol):
    """A model whose graphs may be queued for inputs that are announced.  early: what is."""

    early: Early


class _Announced(threading.local):
    """The coordinates that this thread announced last, and of which kind they are."""

    last: tuple[weakref.ref[torch.Tensor], _Kind] | None = None


_announced = _Announced()
_followers: dict[_Kind, weakref.ref[Follower]] = {}


@state.owns
def forget() -> None:
    """Of all kinds, who was given them."""
    _followers.clear()
    _announced.last = None


def announced(store: MapStore, cmap: CoordinateMap, name: Hashable) -> None:
    """Prepare what inputs of this kind are asked, before the first request: by the graph that will
    probably serve them, else by maps of their own."""
    kind = cmap.device, cmap.coords.shape[1], name
    _announced.last = weakref.ref(cmap.coords), kind
    known = _followers.get(kind)
    owner = None if known is None else known()
    new = cmap.unbounded and padded.current() is None and not hooks.traced()
    if owner is not None and new and owner.early.expect(owner, cmap):
        cmap.validate(cmap.n_rows, cmap.n_rows, False)  # the graph has seen that rows are distinct
        return
    prefetch.announced(store, cmap, name)


def served(owner: Follower, coords: torch.Tensor) -> None:
    """Learn that a replay of `owner` served an input."""
    last = _announced.last
    if last is not None and last[0]() is coords:
        if len(_followers) >= policy.ANNOUNCED_KINDS:
            _followers.clear()
        _followers[last[1]] = weakref.ref(owner)
