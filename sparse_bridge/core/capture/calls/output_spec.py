"""The outputs of calls: what they return and write, as values of a trial or a graph and as those of the call."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from ....refusals import Refusal, Why
from ..padded import named
from .call import Call
from .input_proxies import AMBIGUOUS, PLAIN, InputProxies
from .wrappers import anew, attributes, wraps

MISSING: Any = object()
_DICTS = (dict, collections.OrderedDict)

Lookup = Callable[[Any], Any]


class Tensors(Protocol):
    """What is asked of a framework's sparse tensors here."""

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a sparse tensor or points of the framework."""

    def features_of(self, x: Any) -> torch.Tensor | None:
        """Features [N, C] of a sparse tensor; None for other objects."""

    def coordinates_of(self, x: Any) -> torch.Tensor:
        """Coordinates of a sparse tensor."""


def _nothing(_: Any) -> Any:
    return MISSING


class OutputSpec(NamedTuple):
    """What a call returned, and what it wrote into dictionaries among its inputs.

    proxies: what in there stands for an input of the call, by identity, with its path.  x: the
    sparse tensor that it took.  numbers: whether there are any outside of tensors.
    """

    value: Any
    written: dict[Any, dict[Any, Any]]
    proxies: dict[int, tuple[Any, Any]]
    x: Any
    numbers: bool = False

    @staticmethod
    def of(call: Call, function: Callable[..., Any], start: Callable[[], Any], reads: set[Any]) -> OutputSpec:
        """The call of `function` with another sparse tensor, that `start` makes."""
        inputs = InputProxies(reads, start, call.tensors_of)
        value = call.rerun(function, inputs)
        found = OutputSpec(value, inputs.written(), inputs.proxies, inputs.x)
        inputs.end()
        return found

    def passthrough(self, value: Any) -> Any:
        """`value` where it stands for an input of the call, else MISSING."""
        known = self.proxies.get(id(value))
        return value if value is self.x or (known and known[0] is value) else MISSING

    def input_lookup(self, call: Call) -> Lookup:
        """The function that finds the input of `call` which a value stands for, else MISSING."""

        def found(value: Any) -> Any:
            if self.passthrough(value) is MISSING:
                return MISSING
            path = () if value is self.x else self.proxies[id(value)][1]
            if path is AMBIGUOUS:
                raise Refusal(Why.GRAPH_RETURNS_SHARED)
            return call.input_at(path)

        return found

    def values(self) -> list[Any]:
        """What was returned, then what was written, in the order of the dictionaries."""
        return [self.value, *(one for new in self.written.values() for one in new.values())]

    def values_of_call(self, call: Call, value: Any) -> list[Any]:
        """The same of the call itself, which returned `value`."""
        paths = [(path, key) for path, new in self.written.items() for key in new]
        return [value, *(call.dicts[path][key] for path, key in paths)]

    def write_back(self, call: Call, made: Callable[[Any], Any]) -> Any:
        """What the call returns, with what `made` makes of these values, some of which it writes
        into dictionaries."""
        new = {path: {key: made(one) for key, one in found.items()} for path, found in self.written.items()}
        result = made(self.value)
        for path, entries in new.items():
            call.dicts[path].update(entries)
        return result

    def for_each(self, tensors: Tensors, look: Callable[[torch.Tensor], Any], inside: Callable[[Any], Any]) -> None:
        """Show all tensors to `look` and all sparse ones to `inside`, but for inputs of the call."""

        def seen(tensor: Any) -> Any:
            look(tensor)
            return tensor

        def on_sparse(y: Any) -> Any:
            inside(y)
            return y

        for value in self.values():
            map_structure(tensors, value, seen, on_sparse, self.passthrough)


def map_structure(
    tensors: Tensors,
    value: Any,
    on_tensor: Callable[[torch.Tensor], Any],
    on_sparse: Callable[[Any], Any],
    lookup: Lookup = _nothing,
    memo: dict[int, Any] | None = None,
) -> Any:
    """A model's output with `on_tensor` of every tensor and `on_sparse` of every sparse tensor, in its own
    structure: what is one object stays one.

    lookup: what becomes of a value without being looked at, or MISSING.  memo: what was made of
    values, by identity, if it is to go on.  Raises Refusal.
    """
    memo = {} if memo is None else memo
    found = lookup(value)
    if found is not MISSING:
        return found
    if isinstance(value, PLAIN):
        return value
    if id(value) in memo:
        return memo[id(value)]

    def inside(one: Any) -> Any:
        return map_structure(tensors, one, on_tensor, on_sparse, lookup, memo)

    held = attributes(value)
    if isinstance(value, torch.Tensor):
        made = on_tensor(value)
    elif tensors.is_tensor(value):
        made = on_sparse(value)
    elif type(value) in _DICTS:
        made = type(value)([(name, inside(one)) for name, one in value.items()])
    elif isinstance(value, (list, tuple)):
        parts = [inside(one) for one in value]
        made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif held is not None and wraps(value, tensors.is_tensor):
        made = anew(value, {name: inside(one) for name, one in held.items()})
    else:
        raise Refusal(Why.GRAPH_RETURNS_OBJECT, named(value))
    memo[id(value)] = made
    return made


def has_numbers(value: Any, is_tensor: Callable[[Any], bool]) -> bool:
    """Whether there are numbers in a value, outside of tensors and of what stands for others."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    if isinstance(value, torch.Tensor) or is_tensor(value):
        return False
    held = attributes(value)
    parts: Any = () if held is None else held.values()
    if type(value) in _DICTS:
        parts = value.values()
    elif type(value) in (list, tuple, torch.Size) or hasattr(value, "_fields"):
        parts = value
    return any(has_numbers(one, is_tensor) for one in parts)


class StructureCheck:
    """Whether values that were made for a call are those that it returned, but for numbers in
    tensors: classes, numbers and text, what is one object, and what is the call's own."""

    def __init__(self, call: Call, tensors: Tensors) -> None:
        self._tensors = tensors
        self._owned = call.inputs_by_id(tensors)
        self._pairs: dict[int, Any] = {}
        self._back: dict[int, Any] = {}

    def check(self, name: str, one: Any, other: Any) -> None:
        """Raise Refusal where `one`, of the call, is not like `other`."""
        tensor = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if id(one) in self._owned or (id(other) in self._owned and not tensor):
            if one is not other:
                raise Refusal(Why.GRAPH_OUTPUT_OWNER, name)
            return
        if isinstance(one, PLAIN):
            if type(one) is not type(other) or not (one == other or one != one != other != other):
                raise Refusal(Why.GRAPH_OUTPUT_VALUE, name, one, other)
            return
        if tensor:  # compared elsewhere
            return
        if type(one) is not type(other):
            raise Refusal(Why.GRAPH_OUTPUT_CLASS, name, named(one), named(other))
        if self._pairs.setdefault(id(one), other) is not other or (self._back.setdefault(id(other), one) is not one):
            raise Refusal(Why.GRAPH_OUTPUT_SHARED, name)
        self._inside(name, *(self._parts(value) for value in (one, other)))

    def _parts(self, value: Any) -> Mapping[Any, Any]:
        held = attributes(value)
        if isinstance(value, dict):
            return value
        if isinstance(value, (list, tuple)):
            return dict(enumerate(value))
        if self._tensors.is_tensor(value):
            known = getattr(value, "__dict__", {})
            return {key: one for key, one in known.items() if isinstance(one, PLAIN)}
        return {} if held is None else held

    def _inside(self, name: str, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> None:
        if list(one) != list(other):
            raise Refusal(Why.GRAPH_OUTPUT_KEYS, name, sorted(map(str, one)), sorted(map(str, other)))
        for key, value in one.items():
            self.check(f"{name}, {key}", value, other[key])
