"""Calls of a model: their sparse tensor and their other inputs.

A graph repeats what a model computed of one sparse tensor. What else a call holds must not matter,
or be the same: tensors that the model computes with are found by `ForeignReads`, numbers and text
are part of what a graph was captured for, and of dictionaries only the entries that the model reads
count. Entries that a model writes into a dictionary among its inputs are its output as well.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ....refusals import Refusal, Why
from .input_proxies import Call, InputProxies, with_proxies
from .structures import PLAIN, attributes, is_plain, named, role_of, sparse_in, tensor_constant, wraps


class ReplayResult(NamedTuple):
    """output: of a replay, or MISSING: then run the layers inside of `watch`, and call `computed` with
    their output."""

    output: Any
    computed: Callable[[Any], None] = lambda _: None
    watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def constant(value: Any, n_rows: int) -> Hashable:
    """A value that distinguishes calls with a sparse tensor of so many rows. Raises Refusal for objects that have
    none."""
    if isinstance(value, float):
        return type(value), repr(value)  # -0.0 is not 0.0
    if isinstance(value, PLAIN) or _is_code(value):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return torch.Tensor, *tensor_constant(value, n_rows)
    if isinstance(value, (list, tuple)):
        return type(value), tuple([constant(item, n_rows) for item in value])
    raise Refusal(Why.GRAPH_OBJECT, named(value))


def _is_code(value: Any) -> bool:
    """Whether a value is a class or a function of a module, which hold no more state than the
    forward that takes them."""
    if isinstance(value, (types.FunctionType, type)):
        return getattr(value, "__closure__", None) is None
    return isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, (types.ModuleType, type(None)))


def other_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[Any, dict[Any, Any]], dict[Any, Any]]:
    """(dictionaries, tensors) by path, of arguments without a sparse tensor."""
    arguments = _Arguments(lambda _: None)
    for name, argument in (*enumerate(args), *kwargs.items()):
        arguments.collect(argument, (name,))
    return arguments.dicts, arguments.parts


def rows_of(x: Any, tensors_of: Callable[[Any], Any]) -> int:
    """Rows of a sparse tensor; -1 where its features are something else."""
    features = tensors_of(x).features_of(x)
    return -1 if features is None or not features.ndim else features.shape[0]


def read_constants(dicts: Mapping[Any, dict[Any, Any]], reads: set[Any], n_rows: int) -> Hashable:
    """What counts of dictionaries. Raises Refusal."""
    signature = []
    for path, key in sorted(reads, key=repr):
        own = dicts.get(path)
        if own is not None:
            signature.append((path, key, _entry(own, key, n_rows)))
    return tuple(signature)


def _entry(own: dict[Any, Any], key: Any, n_rows: int) -> Hashable:
    if key not in own:
        return "missing"
    return dict if type(own[key]) is dict else constant(own[key], n_rows)


def call_of(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensors_of: Callable[[Any], Any],
    reads: set[Any],
    prefix: tuple[Any, ...] = (),
) -> Call | None:
    """The call with these arguments, one of which is a sparse tensor, as it is, in a list, in a
    dictionary or in an object around it; None where there is none.

    tensors_of: the framework of a sparse tensor.  reads: what models read of dictionaries.  prefix:
    of all paths.  Raises Refusal.
    """
    arguments = _Arguments(tensors_of)
    parts: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    signature = tuple([(name, arguments.signature(part, (*prefix, name))) for name, part in parts])
    several = len({id(tensor) for tensor in arguments.sparse})
    if several > 1:
        raise Refusal(Why.GRAPH_SEVERAL, several)
    if not several:
        return None
    arguments.refuse_aliases()
    initial = {path: _without(arguments.sparse[0], dict(own)) for path, own in arguments.dicts.items()}
    initial |= {path: dict(vars(own)) for path, own in arguments.objects.items()}
    positional, keywords = len(args), list(kwargs)
    given = [(name, _without(arguments.sparse[0], part)) for name, part in parts]  # `rerun` does not keep the tensor

    def rerun(function: Callable[..., Any], inputs: InputProxies) -> Any:
        inputs.initial, x = initial, inputs.begin()
        is_x = lambda value: value is _X or inputs.is_tensor(value)  # noqa: E731
        proxies = [with_proxies(part, inputs, (*prefix, name), x, is_x) for name, part in given]
        return function(*proxies[:positional], **dict(zip(keywords, proxies[positional:], strict=True)))

    n_rows = rows_of(arguments.sparse[0], tensors_of)
    others = tuple([tensor_constant(tensor, n_rows) for tensor in arguments.tensors])
    constants = signature, others, read_constants(arguments.dicts, reads, n_rows)
    return Call(arguments.sparse[0], rerun, constants, arguments.dicts, arguments.parts, tensors_of)


_X = object()


def _without(x: Any, value: Any) -> Any:
    """A structure with `_X` in the place of `x`."""
    if type(value) in (list, tuple):
        return type(value)([_without(x, item) for item in value])
    if type(value) is dict:
        return {key: _without(x, item) for key, item in value.items()}
    return _X if value is x else value


class _Arguments:
    """What is in the arguments of a call.

    sparse, tensors: of a framework, and of torch.  dicts, objects and parts: see `Call`; objects are parts.
    """

    def __init__(self, tensors_of: Callable[[Any], Any]) -> None:
        self._tensors_of = tensors_of
        self.sparse: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.dicts: dict[Any, dict[Any, Any]] = {}
        self.objects: dict[Any, Any] = {}
        self.parts: dict[Any, Any] = {}

    def is_tensor(self, value: Any) -> bool:
        tensors = self._tensors_of(value)
        return tensors is not None and tensors.is_tensor(value)

    def signature(self, value: Any, path: Any) -> Hashable:
        """The part of a structure that distinguishes calls, without entries of dictionaries but for
        those with sparse tensors. Raises Refusal."""
        if self.is_tensor(value):
            self.sparse.append(value)
            return "x"
        if type(value) in (list, tuple):
            parts = [self.signature(item, (*path, n)) for n, item in enumerate(value)]
            return type(value), tuple(parts)
        if type(value) is dict:
            return self._dict(value, path)
        if wraps(value, self.is_tensor):
            return self._object(value, path)
        if isinstance(value, torch.Tensor):
            self.parts[path] = value
            self.tensors.append(value)
            return torch.Tensor
        return constant(value, -1)

    def _dict(self, value: dict[Any, Any], path: Any) -> Hashable:
        self.dicts[path] = value
        signature = []
        for key, entry in value.items():
            if type(entry) is dict or self.is_tensor(entry) or wraps(entry, self.is_tensor):
                signature.append((key, self.signature(entry, (*path, key))))
            else:
                self.collect(entry, (*path, key))
        return dict, tuple(signature)

    def collect(self, value: Any, path: Any) -> None:
        """Remember dictionaries and tensors that lie deeper."""
        if isinstance(value, torch.Tensor):
            self.parts[path] = value
        elif type(value) in (list, tuple):
            for number, item in enumerate(value):
                self.collect(item, (*path, number))
        elif type(value) is dict:
            self._dict(value, path)

    def _object(self, value: Any, path: Any) -> Hashable:
        self.objects[path] = self.parts[path] = value
        named_values = attributes(value)
        assert named_values is not None
        (x,) = {id(tensor): tensor for tensor in sparse_in(value, self.is_tensor)}.values()
        signature = [(name, self._part(value, attribute, (*path, name), x)) for name, attribute in named_values.items()]
        return type(value), tuple(signature)

    def _part(self, own: Any, value: Any, path: Any, x: Any) -> Hashable:
        """The same of an attribute of an object around `x`."""
        if is_plain(value):
            return constant(value, -1)
        if isinstance(value, torch.Tensor):
            role = role_of(value, x, self._tensors_of(x))
            if role == "tensor":
                self.parts[path] = value
            return role
        if type(value) in (list, tuple):
            self.parts[path] = value
            return type(value), bool(value)
        if type(value) is dict or self.is_tensor(value) or wraps(value, self.is_tensor):
            return self.signature(value, path)
        raise Refusal(Why.GRAPH_ATTRIBUTE, path[-1], named(own), named(value))

    def refuse_aliases(self) -> None:
        """Raise Refusal where one object that can be written to has two paths."""
        paths = [*self.dicts.values(), *self.objects.values()]
        lists = [part for part in self.parts.values() if type(part) in (list, tuple)]
        if len({id(part) for part in (*paths, *lists)}) < len(paths) + len(lists):
            raise Refusal(Why.GRAPH_TWO_PLACES)
