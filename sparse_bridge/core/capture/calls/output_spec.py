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
    """The methods of a framework's sparse tensors that outputs need."""

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

    proxies: values in there that stand for inputs of the call, by identity, with their paths.  x:
    the sparse tensor that it took.  numbers: whether there are any outside of tensors.
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
        spec = OutputSpec(value, inputs.written(), inputs.proxies, inputs.x)
        inputs.end()
        return spec

    def passthrough(self, value: Any) -> Any:
        """`value` where it stands for an input of the call, else MISSING."""
        registered = self.proxies.get(id(value))
        return value if value is self.x or (registered and registered[0] is value) else MISSING

    def input_lookup(self, call: Call) -> Lookup:
        """The function that finds the input of `call` which a value stands for, else MISSING."""

        def lookup(value: Any) -> Any:
            if self.passthrough(value) is MISSING:
                return MISSING
            path = () if value is self.x else self.proxies[id(value)][1]
            if path is AMBIGUOUS:
                raise Refusal(Why.GRAPH_RETURNS_SHARED)
            return call.input_at(path)

        return lookup

    def values(self) -> list[Any]:
        """What was returned, then what was written, in the order of the dictionaries."""
        return [self.value, *(entry for new in self.written.values() for entry in new.values())]

    def values_of_call(self, call: Call, value: Any) -> list[Any]:
        """The same of the call itself, which returned `value`."""
        paths = [(path, key) for path, new in self.written.items() for key in new]
        return [value, *(call.dicts[path][key] for path, key in paths)]

    def write_back(self, call: Call, convert: Callable[[Any], Any]) -> Any:
        """What the call returns: the values of this output, each through `convert`. Those that were
        written into dictionaries are written into those of the call."""
        new = {path: {key: convert(entry) for key, entry in entries.items()} for path, entries in self.written.items()}
        result = convert(self.value)
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

    lookup: what replaces a value that is not looked into, or MISSING.  memo: results by the
    identity of their values, to be shared between calls.  Raises Refusal.
    """
    memo = {} if memo is None else memo
    replacement = lookup(value)
    if replacement is not MISSING:
        return replacement
    if isinstance(value, PLAIN):
        return value
    if id(value) in memo:
        return memo[id(value)]

    def inside(part: Any) -> Any:
        return map_structure(tensors, part, on_tensor, on_sparse, lookup, memo)

    own_attributes = attributes(value)
    if isinstance(value, torch.Tensor):
        result = on_tensor(value)
    elif tensors.is_tensor(value):
        result = on_sparse(value)
    elif type(value) in _DICTS:
        result = type(value)([(name, inside(part)) for name, part in value.items()])
    elif isinstance(value, (list, tuple)):
        parts = [inside(part) for part in value]
        result = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif own_attributes is not None and wraps(value, tensors.is_tensor):
        result = anew(value, {name: inside(part) for name, part in own_attributes.items()})
    else:
        raise Refusal(Why.GRAPH_RETURNS_OBJECT, named(value))
    memo[id(value)] = result
    return result


def has_numbers(value: Any, is_tensor: Callable[[Any], bool]) -> bool:
    """Whether there are numbers in a value, outside of tensors and of what stands for others."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    if isinstance(value, torch.Tensor) or is_tensor(value):
        return False
    own_attributes = attributes(value)
    parts: Any = () if own_attributes is None else own_attributes.values()
    if type(value) in _DICTS:
        parts = value.values()
    elif type(value) in (list, tuple, torch.Size) or hasattr(value, "_fields"):
        parts = value
    return any(has_numbers(part, is_tensor) for part in parts)


class StructureCheck:
    """Whether values that a graph computed for a call are like those that it returned, but for
    numbers in tensors: classes, numbers and text, what is one object, and what is the call's own."""

    def __init__(self, call: Call, tensors: Tensors) -> None:
        self._tensors = tensors
        self._owned = call.inputs_by_id(tensors)
        self._pairs: dict[int, Any] = {}
        self._back: dict[int, Any] = {}

    def check(self, name: str, value: Any, other: Any) -> None:
        """Raise Refusal where `value`, of the call, is not like `other`."""
        tensor = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        if id(value) in self._owned or (id(other) in self._owned and not tensor):
            if value is not other:
                raise Refusal(Why.GRAPH_OUTPUT_OWNER, name)
            return
        if isinstance(value, PLAIN):
            if type(value) is not type(other) or not (value == other or value != value != other != other):
                raise Refusal(Why.GRAPH_OUTPUT_VALUE, name, value, other)
            return
        if tensor:  # compared elsewhere
            return
        if type(value) is not type(other):
            raise Refusal(Why.GRAPH_OUTPUT_CLASS, name, named(value), named(other))
        if self._pairs.setdefault(id(value), other) is not other or (
            self._back.setdefault(id(other), value) is not value
        ):
            raise Refusal(Why.GRAPH_OUTPUT_SHARED, name)
        self._inside(name, self._parts(value), self._parts(other))

    def _parts(self, value: Any) -> Mapping[Any, Any]:
        own_attributes = attributes(value)
        if isinstance(value, dict):
            return value
        if isinstance(value, (list, tuple)):
            return dict(enumerate(value))
        if self._tensors.is_tensor(value):
            variables = getattr(value, "__dict__", {})
            return {key: variable for key, variable in variables.items() if isinstance(variable, PLAIN)}
        return {} if own_attributes is None else own_attributes

    def _inside(self, name: str, entries: Mapping[Any, Any], other: Mapping[Any, Any]) -> None:
        if list(entries) != list(other):
            raise Refusal(Why.GRAPH_OUTPUT_KEYS, name, sorted(map(str, entries)), sorted(map(str, other)))
        for key, entry in entries.items():
            self.check(f"{name}, {key}", entry, other[key])
