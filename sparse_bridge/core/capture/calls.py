"""Calls of a model: the sparse tensor that they are about, and what else they are given.

A graph repeats what a model computed of one sparse tensor. What else a call holds must not matter,
or be the same: tensors that the model computes with are found by `foreign_reads`, numbers and text
are part of what a graph was captured for, and of dictionaries only the entries that the model reads
count. Entries that a model writes into a dictionary it was given are its output as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .padded import UnpaddedError, named

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class Call(NamedTuple):
    """x: the sparse tensor.  over: calls a function as the model was, with another sparse tensor in
    the place of x and dictionaries that are watched, as `Given` has them.  constants: what else
    counts, by value.  dicts: the dictionaries that were given, by place."""

    x: Any
    over: Callable[[Callable[..., Any], Given], Any]
    constants: Hashable
    dicts: Mapping[Any, dict[Any, Any]]


class Given:
    """What a call is given instead: another sparse tensor, and copies of the dictionaries, which
    say what of them is read and written from `begin` on."""

    def __init__(self, reads: set[Any], start: Callable[[], Any]) -> None:
        """reads: (place, key) of what was read, which grows.  start: makes the sparse tensor, when
        the part of the call begins that counts."""
        self.reads, self._start = reads, start
        self.x: Any = None
        self.before: Mapping[Any, dict[Any, Any]] = {}  # as they were when the call came
        self.copies: dict[Any, Watched] = {}
        self.watching = False

    def copy(self, place: Any, own: dict[Any, Any]) -> Watched:
        made = self.copies[place] = Watched(own)
        made.place, made.given, made.own = place, self, dict(own) if self.watching else {}
        return made

    def begin(self) -> Any:
        """The sparse tensor."""
        self.x = self._start()
        for one in self.copies.values():
            one.own = dict(dict.items(one))
        self.watching = True
        return self.x

    def written(self) -> dict[Any, dict[Any, Any]]:
        """New values by place and key. Raises UnpaddedError where entries are gone."""
        found = {}
        for place, copy in self.copies.items():
            if not copy.own.keys() <= set(dict.keys(copy)):
                raise UnpaddedError("it takes entries out of a dictionary that it was given.")
            new = {
                key: value
                for key, value in dict.items(copy)
                if key not in copy.own or copy.own[key] is not value
            }
            if new:
                found[place] = new
        return found


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
            if value is self.given.x:
                return
            if not isinstance(value, (*PLAIN, torch.Tensor, dict)):
                raise UnpaddedError(f"it reads {key!r}, a {type(value).__name__}.")
        self.given.reads.add((self.place, key))

    def __getitem__(self, key: Any) -> Any:
        self._seen(key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._seen(key)
        return dict.get(self, key, default)

    def __contains__(self, key: Any) -> bool:
        self._seen(key)
        return dict.__contains__(self, key)


def _whole(name: str) -> Any:
    own = getattr(dict, name)

    def method(self: Watched, *args: Any, **kwargs: Any) -> Any:
        if self.given.watching:
            raise UnpaddedError("it looks at all of a dictionary that it was given.")
        return own(self, *args, **kwargs)

    return method


for _name in (
    "__iter__", "__len__", "__eq__", "__or__", "__ror__", "keys", "values", "items", "copy", "pop",
    "popitem", "clear", "setdefault",
):  # fmt: skip
    setattr(Watched, _name, _whole(_name))


class Outcome(NamedTuple):
    """What a call returned, and what it wrote into dictionaries that it was given."""

    value: Any
    written: dict[Any, dict[Any, Any]]

    @staticmethod
    def of(
        call: Call, function: Callable[..., Any], start: Callable[[], Any], reads: set[Any]
    ) -> Outcome:
        """The call of `function` with another sparse tensor, that `start` makes."""
        given = Given(reads, start)
        value = call.over(function, given)
        return Outcome(value, given.written())

    def seen_in(self, call: Call, value: Any) -> list[Any]:
        """The same of the call itself, which returned `value`."""
        mine = [] if isinstance(self.value, Watched) else [value]
        return mine + [call.dicts[place][key] for place, new in self.written.items() for key in new]

    def given_to(self, call: Call, made: Callable[[Any], Any]) -> Any:
        """What the call returns, with what `made` makes of these values, some of which it writes
        into dictionaries."""
        new = {
            place: {key: made(one) for key, one in found.items()}
            for place, found in self.written.items()
        }
        value = self.value
        result = None if isinstance(value, Watched) else made(value)
        for place, entries in new.items():
            call.dicts[place].update(entries)
        return call.dicts[value.place] if isinstance(value, Watched) else result

    def values(self) -> list[Any]:
        mine = [] if isinstance(self.value, Watched) else [self.value]
        return mine + [one for new in self.written.values() for one in new.values()]


def constant(value: Any) -> Hashable:
    """A value by which calls are told apart. Raises UnpaddedError for objects that have none."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.ndim, value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), tuple([constant(one) for one in value])
    raise UnpaddedError(f"it is given a {named(value)}.")


def dicts_in(value: Any, place: Any = ()) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """(place, dictionary) of all dictionaries in a structure."""
    if type(value) is dict:
        yield place, value
        for key, one in value.items():
            yield from dicts_in(one, (*place, key))
    elif type(value) in (list, tuple):
        for number, one in enumerate(value):
            yield from dicts_in(one, (*place, number))


def read_constants(dicts: Mapping[Any, dict[Any, Any]], reads: set[Any]) -> Hashable:
    """What counts of dictionaries. Raises UnpaddedError."""
    shown = []
    for place, key in sorted(reads, key=repr):
        own = dicts.get(place)
        if own is not None:
            shown.append((place, key, _entry(own, key)))
    return tuple(shown)


def _entry(own: dict[Any, Any], key: Any) -> Hashable:
    if key not in own:
        return "missing"
    return dict if type(own[key]) is dict else constant(own[key])


def with_copies(value: Any, given: Given, place: Any = (), x: Any = None, is_x: Any = None) -> Any:
    """A structure with watched copies of its dictionaries, and `x` for what `is_x`."""
    if is_x is not None and is_x(value):
        return x
    if type(value) in (list, tuple):
        parts = [with_copies(one, given, (*place, n), x, is_x) for n, one in enumerate(value)]
        return type(value)(parts)
    if type(value) is dict:
        own = given.before.get(place, value)
        made = {key: with_copies(one, given, (*place, key), x, is_x) for key, one in own.items()}
        return given.copy(place, made)
    return value


def call_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], is_tensor: Callable[[Any], bool],
    reads: set[Any],
) -> Call | None:  # fmt: skip
    """The call with these arguments, one of which is a sparse tensor, as it is, in a list or in a
    dictionary; None where there is none or there are several.

    is_tensor: whether a value is a sparse tensor.  reads: what models read of dictionaries.
    Raises UnpaddedError.
    """
    tensors: list[Any] = []
    named = [(name, _shape(one, is_tensor, tensors)) for name, one in kwargs.items()]
    shown = [_shape(one, is_tensor, tensors) for one in args]
    if len(tensors) != 1:
        return None
    dicts = all_dicts(args, kwargs)
    before = {place: dict(own) for place, own in dicts.items()}

    def over(function: Callable[..., Any], given: Given) -> Any:
        given.before, x = before, given.begin()
        put = [with_copies(one, given, (n,), x, is_tensor) for n, one in enumerate(args)]
        keys = {k: with_copies(one, given, (k,), x, is_tensor) for k, one in kwargs.items()}
        return function(*put, **keys)

    return Call(tensors[0], over, (tuple(shown), tuple(named), read_constants(dicts, reads)), dicts)


def all_dicts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Any, dict[Any, Any]]:
    parts = [*enumerate(args), *kwargs.items()]
    return {place: found for name, one in parts for place, found in dicts_in(one, (name,))}


def _shape(value: Any, is_tensor: Callable[[Any], bool], tensors: list[Any]) -> Hashable:
    """What tells calls apart in a structure but for dictionaries, whose sparse tensors are found
    as well."""
    if is_tensor(value):
        tensors.append(value)
        return "x"
    if type(value) in (list, tuple):
        return type(value), tuple([_shape(one, is_tensor, tensors) for one in value])
    if type(value) is dict:
        found = [
            (key, _shape(one, is_tensor, tensors))
            for key, one in value.items()
            if is_tensor(one) or type(one) is dict
        ]
        return dict, tuple(found)
    return constant(value)


class _ForeignReads(TorchDispatchMode):
    """Refuses operations on tensors that were there before, but for some."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.held = known
        # Weak ones, which keep addresses from being used again.
        self.known = {one.untyped_storage()._cdata: _weak(one) for one in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for one in _tensors((args, kwargs)):
            if one.untyped_storage()._cdata not in self.known and one.numel():
                raise UnpaddedError(
                    f"it computes with a tensor of shape {list(one.shape)} that is none of its "
                    "own parameters and buffers, nor the features that it is given."
                )
        out = func(*args, **(kwargs or {}))
        for one in _tensors(out):
            self.known.setdefault(one.untyped_storage()._cdata, _weak(one))
        return out


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextlib.contextmanager
def foreign_reads(known: list[torch.Tensor]) -> Iterator[None]:
    """Raise UnpaddedError where torch computes with tensors from outside that are none of these."""
    with _ForeignReads(known):
        yield
