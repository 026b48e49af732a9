"""Dictionaries of kernel maps, some of which are made when a program looks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch


class LateSource(NamedTuple):
    """keys: of kernel maps that `make` makes, each of its key, in the order in which layers have made them; unbuilt:
    those of them that no layer could build itself.

    coords: of a level; None where `of_level` is empty.  of_level: what there is to know of those maps that layers
    over this level would build again, by key."""

    keys: tuple[Hashable, ...]
    unbuilt: frozenset[Hashable]
    make: Callable[[Any], Any]
    coords: torch.Tensor | None = None
    of_level: Mapping[Hashable, Hashable] = {}


class LateMaps(dict[Any, Any]):
    """Kernel maps by key, some of which are made when a program looks for them, or at all of them. Layers look with
    `map_for_layer`, and hand on what `carried` returns. All maps are listed in the order in which layers have made
    them."""

    _made: set[Hashable]
    _order: dict[Hashable, None]

    def __init__(self, maps: dict[Any, Any], *sources: LateSource) -> None:
        """The maps of a dictionary, those that are made late so here as well, and behind them those of the sources."""
        super().__init__(present(maps))
        late = maps if isinstance(maps, LateMaps) else None
        self.sources: list[LateSource] = [*late.sources] if late is not None else []
        self._made = set(late._made if late is not None else ())
        self._order = dict(late._order if late is not None else dict.fromkeys(present(maps)))
        for source in sources:
            self.add(source)

    def add(self, source: LateSource) -> None:
        """Have the maps of another source behind the others."""
        self.sources.append(source)
        self._order.update(dict.fromkeys(source.keys))

    def late_keys(self) -> frozenset[Hashable]:
        """Of the maps that are still to be made."""
        return frozenset([key for source in self.sources for key in source.keys]).difference(self._made)

    def take(self, key: Hashable) -> None:
        """Have the map of this key, if it is still to be made."""
        if key in self._made or dict.__contains__(self, key):
            return
        source = next((source for source in self.sources if key in source.keys), None)
        if source is not None:
            dict.__setitem__(self, key, source.make(key))
            self._made.add(key)

    def take_all(self) -> None:
        """Have all maps, in order."""
        for key in self._order:
            self.take(key)
        ordered = {key: dict.__getitem__(self, key) for key in self._order if dict.__contains__(self, key)}
        if list(ordered) != list(dict.keys(self)):
            dict.clear(self)
            dict.update(self, ordered)

    def copy(self) -> LateMaps:
        """The same maps, which are made as late."""
        return LateMaps(self)

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if not dict.__contains__(self, key) and key not in self.late_keys():
            self._order.pop(key, None)  # it may have been taken out
        self._order[key] = None
        self._made.add(key)  # also where it is taken out again
        dict.__setitem__(self, key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dictionary."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> LateMaps:  # type: ignore[misc]  # of C, it would not call `__setitem__`
        self.update(other)
        return self

    def setdefault(self, key: Hashable, default: Any = None) -> Any:
        """As of a dictionary."""
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _looking(name: str, at_one: bool) -> Callable[..., Any]:
    own = getattr(dict, name)

    @functools.wraps(own)
    def look(self: LateMaps, *args: Any) -> Any:
        if at_one:
            self.take(args[0])
        else:
            self.take_all()
        return own(self, *args)

    return look


for _name in ("__getitem__", "__contains__", "__delitem__", "get", "pop"):
    setattr(LateMaps, _name, _looking(_name, True))
for _name in ("__len__", "__iter__", "__reversed__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "keys"):
    setattr(LateMaps, _name, _looking(_name, False))
for _name in ("values", "items", "popitem", "clear"):
    setattr(LateMaps, _name, _looking(_name, False))


def present(maps: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of the maps that are there, without making others."""
    return dict(dict.items(maps))


def late_facts(maps: dict[Any, Any], coords: torch.Tensor) -> dict[Hashable, Hashable]:
    """What there is to know of the maps over a level that are still to be made, by key."""
    if not isinstance(maps, LateMaps):
        return {}
    late, of_level = maps.late_keys(), [source.of_level for source in maps.sources if source.coords is coords]
    return {key: known[key] for known in of_level for key in known if key in late}


def carried(maps: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of maps for the result of a layer; those that are made late are so in the copy."""
    return maps.copy() if isinstance(maps, LateMaps) else dict(maps)


def map_for_layer(maps: dict[Any, Any], key: Hashable) -> Any:
    """The map that a layer looks for; None where it is to build one."""
    if isinstance(maps, LateMaps) and any(key in source.unbuilt for source in maps.sources):
        maps.take(key)
    return dict.get(maps, key)
