"""What a call is given in a trial, in place of what it was given: something that tells what the
model reads of it, and what it writes.

Objects around the sparse tensor become others of the same class. Their numbers and text are part of
what a graph is captured for; lists and other tensors may only be passed on, and stand for those of
the calls to come: whoever looks into them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from ....refusals import Refusal, Why
from .wrappers import anew, attributes, sparse_in, wraps

ENTRANCE = ("its entrance",)  # in front of places of what it is given
SEVERAL = object()  # in the place of a place
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


def is_plain(value: Any) -> bool:
    """Whether a value is numbers and text, which nobody can change."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


class Given:
    """What a call is given instead: another sparse tensor, and copies of the dictionaries and of
    the objects around sparse tensors, which say what of them is read and written from `begin` on.

    twins: by identity, everything that stands for something of the call, and its place there.
    """

    def __init__(self, reads: set[Any], start: Callable[[], Any], tensors_of: Callable[[Any], Any]) -> None:
        """reads: (place, key) of what was read, which grows.  start: makes the sparse tensor, when
        the part of the call begins that counts.  tensors_of: the framework of one."""
        self.reads, self._start, self._tensors_of = reads, start, tensors_of
        self.x: Any = None
        self.before: Mapping[Any, dict[Any, Any]] = {}  # as they were when the call came
        self.copies: dict[Any, Watched] = {}
        self.watching = False
        self.twins: dict[int, tuple[Any, Any]] = {}
        self._objects: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._refusal: Refusal | None = None

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a sparse tensor of the framework."""
        tensors = self._tensors_of(value)
        return tensors is not None and tensors.is_tensor(value)

    def refuse(self, why: Why, *details: Any) -> NoReturn:
        """Raise Refusal, now and at the end: models may catch it here."""
        self._refusal = self._refusal or Refusal(why, *details)
        raise self._refusal

    def copy(self, place: Any, own: dict[Any, Any]) -> Watched:
        """A copy of the dictionary `own` in a place of the call, whose reads are noticed."""
        made = self.copies[place] = Watched(own)
        made.place, made.given, made.own = place, self, dict(own) if self.watching else {}
        self.stands(made, place)
        return made

    def stands(self, twin: Any, place: Any) -> None:
        """A value stands for what a call has in a place."""
        known = self.twins.get(id(twin))
        self.twins[id(twin)] = twin, place if known is None else SEVERAL

    def begin(self) -> Any:
        """The sparse tensor."""
        self.x = self._start()
        for one in self.copies.values():
            one.own = dict(dict.items(one))
        self.watching = True
        return self.x

    def entered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Begin where an entrance is called, and what it is to be given."""
        self.begin()
        named = {key: self.in_place_of(one, (*ENTRANCE, key)) for key, one in kwargs.items()}
        return [self.in_place_of(one, (*ENTRANCE, n)) for n, one in enumerate(args)], named

    def in_place_of(self, value: Any, place: Any) -> Any:
        """What stands for a sparse tensor or an object around one; other values do themselves."""
        if self.is_tensor(value):
            return self.x
        return self.object(value, place) if wraps(value, self.is_tensor) else value

    def object(self, own: Any, place: Any) -> Any:
        """An object like `own`, around the sparse tensor of this trial."""
        held = self.before.get(place, attributes(own))
        assert held is not None
        (x,) = {id(one): one for one in sparse_in(own, self.is_tensor)}.values()
        twin = anew(own, {name: self._part(one, (*place, name), x) for name, one in held.items()})
        self._objects.append((twin, dict(vars(twin)), dict(vars(type(twin)))))
        self.stands(twin, place)
        return twin

    def made(self, value: Any) -> bool:
        """Whether a value is such an object."""
        return any(value is one for one, _, _ in self._objects)

    def _part(self, value: Any, place: Any, x: Any) -> Any:
        """What stands for an attribute of an object around `x`."""
        if is_plain(value):
            return value
        if isinstance(value, torch.Tensor):
            tensors, role = self._tensors_of(x), role_of(value, x, self._tensors_of(x))
            if role == "features":
                return tensors.features_of(self.x)
            if role == "coordinates":
                return tensors.coordinates_of(self.x)
            twin: Any = _unread(self, place)
        elif type(value) in (list, tuple):
            twin = _UnreadList() if type(value) is list else _UnreadTuple()
            twin.given, twin.place, twin.truth = self, place, bool(value)
        elif type(value) is dict:
            return with_copies(value, self, place, self.x, self.is_tensor, unread=True)
        else:
            return self.in_place_of(value, place)
        self.stands(twin, place)
        return twin

    def written(self) -> dict[Any, dict[Any, Any]]:
        """New values by place and key. Raises Refusal where entries are gone, attributes were
        written, or something was refused before."""
        if self._refusal is not None:
            raise self._refusal
        for twin, held, shared in self._objects:
            if not _same_entries(vars(twin), held) or not _same_entries(vars(type(twin)), shared):
                raise Refusal(Why.GRAPH_WRITES_OBJECT, type(twin).__name__)
        found = {}
        for place, copy in self.copies.items():
            if not copy.own.keys() <= set(dict.keys(copy)):
                raise Refusal(Why.GRAPH_TAKES_ENTRIES)
            new = {key: value for key, value in dict.items(copy) if key not in copy.own or copy.own[key] is not value}
            if new:
                found[place] = new
        return found

    def end(self) -> None:
        """Let go of what the call was given."""
        self.before, self._start = {}, lambda: None
        self._objects.clear()
        for copy in self.copies.values():
            dict.clear(copy)
            copy.own = {}


def _same_entries(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in other)


def role_of(value: torch.Tensor, x: Any, tensors: Any) -> str:
    """What a tensor is of the sparse tensor beside it."""
    if value is tensors.features_of(x):
        return "features"
    return "coordinates" if value is tensors.coordinates_of(x) else "tensor"


def with_copies(
    value: Any, given: Given, place: Any = (), x: Any = None, is_x: Any = None, unread: bool = False
) -> Any:
    """A structure with watched copies of its dictionaries, `x` for what `is_x`, and objects around
    it in the place of those around that.

    unread: tensors have no values, either."""
    if is_x is not None and is_x(value):
        return x
    if isinstance(value, torch.Tensor):
        twin = _unread(given, place) if unread else value
        given.stands(twin, place)
        return twin

    def inside(key: Any, one: Any) -> Any:
        return with_copies(one, given, (*place, key), x, is_x, unread)

    if type(value) in (list, tuple):
        return type(value)([inside(n, one) for n, one in enumerate(value)])
    if type(value) is dict:
        own = given.before.get(place, value)
        return given.copy(place, {key: inside(key, one) for key, one in own.items()})
    if is_x is not None and not unread and wraps(value, is_x):
        return given.object(value, place)
    return value


class Watched(dict):  # type: ignore[type-arg]
    """A copy of a dictionary. Entries that were there are read one by one, under their keys."""

    place: Any
    given: Given
    own: dict[Any, Any]

    def _seen(self, key: Any) -> None:
        if not self.given.watching:
            return
        if dict.__contains__(self, key):
            value = dict.__getitem__(self, key)
            if key not in self.own or self.own[key] is not value:
                return  # its own
            if value is self.given.x or self.given.made(value):
                return
            if not isinstance(value, (*PLAIN, torch.Tensor, dict)):
                self.given.refuse(Why.GRAPH_READS_OBJECT, key, type(value).__name__)
        self.given.reads.add((self.place, key))

    def __getitem__(self, key: Any) -> Any:
        self._seen(key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary; the read is noticed."""
        self._seen(key)
        return dict.get(self, key, default)

    def __contains__(self, key: Any) -> bool:
        self._seen(key)
        return dict.__contains__(self, key)


def _whole(name: str) -> Any:
    own = getattr(dict, name)

    def method(self: Watched, *args: Any, **kwargs: Any) -> Any:
        if self.given.watching:
            self.given.refuse(Why.GRAPH_READS_ALL)
        return own(self, *args, **kwargs)

    return method


for _name in (
    "__iter__",
    "__len__",
    "__eq__",
    "__or__",
    "__ror__",
    "keys",
    "values",
    "items",
    "copy",
    "pop",
    "popitem",
    "clear",
    "setdefault",
):
    setattr(Watched, _name, _whole(_name))


class _Unseen:
    """What stands for a list or a tuple, and holds nothing."""

    given: Given
    place: Any
    truth: bool

    def __bool__(self) -> bool:
        return self.truth


class _UnreadList(_Unseen, list[Any]):
    """Stands for a list."""


class _UnreadTuple(_Unseen, tuple[Any, ...]):
    """Stands for a tuple."""


def _looking(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.given.refuse(Why.GRAPH_READS_LIST, self.place[-1])


for _kind, _names in (
    (
        _UnreadList,
        (
            "__delitem__",
            "__iadd__",
            "__imul__",
            "__reversed__",
            "__setitem__",
            "append",
            "clear",
            "copy",
            "extend",
            "insert",
            "pop",
            "remove",
            "reverse",
            "sort",
        ),
    ),
    (_UnreadTuple, ("__hash__",)),
):
    for _name in (
        *_names,
        "__add__",
        "__contains__",
        "__eq__",
        "__ge__",
        "__getitem__",
        "__gt__",
        "__iter__",
        "__le__",
        "__len__",
        "__lt__",
        "__mul__",
        "__ne__",
        "__reduce_ex__",
        "__repr__",
        "__rmul__",
        "count",
        "index",
    ):
        setattr(_kind, _name, _looking)


def _unread(given: Given, place: Any) -> torch.Tensor:
    """Stands for a tensor, and has no values."""

    class Unread(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            given.refuse(Why.GRAPH_READS_TENSOR, place[-1])

    made: torch.Tensor = torch.Tensor._make_subclass(Unread, torch.empty(0))
    return made
