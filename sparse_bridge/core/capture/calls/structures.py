"""What calls take and return: sparse tensors, lists and dictionaries, and objects of a program's own classes.

An object around a sparse tensor can be taken apart where all that it knows lies in its attributes, so that
another one with the same attributes is the same but for its identity.
"""

from __future__ import annotations

import abc
import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ....refusals import Refusal, Why

MISSING: Any = object()
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, collections.OrderedDict)
_DEEPEST = 3  # objects inside of objects
_HEAP_TYPE = 1 << 9  # of a class that Python code defines
_OWN = ("__new__", "__getattribute__", "__setattr__", "__delattr__", "__del__", "__reduce_ex__")
_SLOTS = frozenset({"__dict__", "__weakref__"})

IsTensor = Callable[[Any], bool]
Lookup = Callable[[Any], Any]


def tensor_constant(value: torch.Tensor, n_rows: int) -> tuple[Hashable, ...]:
    """What a program may ask of a tensor besides its values, but for its rows where these are the `n_rows` of the
    sparse tensor. Raises Refusal."""
    if value.is_nested:  # it has no shape
        raise Refusal(Why.GRAPH_OBJECT, "nested tensor")
    shape = tuple(value.shape)
    return value.dtype, *traits_of(value), len(shape), shape[1:] if shape[:1] == (n_rows,) else shape


def traits_of(value: torch.Tensor) -> tuple[Any, ...]:
    """What a program may ask of a tensor besides its values, shape and dtype; hashable."""
    dense = value.layout is torch.strided  # others may not say
    flags = value.requires_grad, value.is_inference(), dense and value.is_contiguous()
    return *flags, type(value), value.layout, tuple(value.__dict__)


def own_attributes(x: Any) -> set[str]:
    """Attributes of a sparse tensor that its class does not know: a program's own."""
    return {name for name in getattr(x, "__dict__", {}) if name[:1] != "_" and not hasattr(type(x), name)}


class Tensors(Protocol):
    """How the sparse tensors of one framework are read and made anew; see
    `adapters.protocol.TensorProtocol`."""

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a sparse tensor or points of the framework."""

    def features_of(self, x: Any) -> torch.Tensor | None:
        """Features [N, C] of a sparse tensor or of points; None for other objects."""

    def coordinates_of(self, x: Any) -> torch.Tensor:
        """Coordinates of a sparse tensor, the object that its kernel maps are known by."""

    def with_features(self, x: Any, features: torch.Tensor) -> Any:
        """A sparse tensor like `x` with features [N, C'] on the same rows, kernel maps included."""

    def capture_root(self, x: Any) -> Any:
        """The coordinates of `x` where a model over it may be captured; None where it may not."""

    def levels_of(self, x: Any) -> frozenset[Hashable]:
        """Names of the levels that the framework keeps with `x` beside its own."""

    def is_fresh(self, x: Any) -> bool:
        """Whether the framework keeps no levels and kernel maps with `x`."""

    def over(self, x: Any, features: torch.Tensor, root: Any) -> Any:
        """A sparse tensor like `x` over the coordinates `root`, without kernel maps."""

    def apart(self, x: Any, features: torch.Tensor) -> Any:
        """A sparse tensor with other features over the coordinates of `x`, which knows nothing of `x` or its maps."""

    def on_rows_of(self, x: Any, y: Any) -> bool:
        """Whether `y`, which a model made of `x`, has its rows."""

    def result(self, x: Any, y: Any, features: torch.Tensor, coords: torch.Tensor | None, box: Any) -> Any:
        """What a model would have made of `x` where it made `y` of another input, by features
        [N, C] and coordinates. coords: None for those of `x`.  box: of the coordinates, if not that of `y`."""

    def label(self, x: Any) -> Hashable:
        """What `x` says of itself besides features and coordinates, by value."""

    def keep_for(self, y: Any, captured: Any, results: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let layers find kernel maps and levels of the result `y`, which is like `captured`. results: of the call, a
        `Results`.  cut: copies the rows in use of one of the capture's tensors."""

    def is_norm(self, module: nn.Module) -> bool:
        """Whether this is a BatchNorm1d of torch, or the framework's over its own tensors."""

    def is_own(self, module: nn.Module) -> bool:
        """Whether the class of a module is the framework's or torch's own."""

    def switches(self) -> Hashable:
        """What the framework's layers look at besides their arguments, by value."""


def named(value: Any) -> str:
    """The class of an object in messages: programs have classes that are called like ours."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def is_plain(value: Any) -> bool:
    """Whether a value is numbers and text, which nobody can change."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def role_of(value: torch.Tensor, x: Any, tensors: Any) -> str:
    """What a tensor is of the sparse tensor beside it."""
    if value is tensors.features_of(x):
        return "features"
    return "coordinates" if value is tensors.coordinates_of(x) else "tensor"


@functools.lru_cache(maxsize=1024)
def _plain_class(cls: Any) -> bool:
    if type(cls) not in (type, abc.ABCMeta) or issubclass(cls, nn.Module):
        return False
    for base in cls.__mro__[:-1]:
        slots = vars(base).get("__slots__", ())
        if not base.__flags__ & _HEAP_TYPE or not set(slots) <= _SLOTS:
            return False
    return cls.__dictoffset__ != 0 and all(getattr(cls, name, None) is getattr(object, name, None) for name in _OWN)


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is nothing else; None for other objects."""
    cls: Any = type(value)
    return vars(value) if _plain_class(cls) else None


def wraps(value: Any, is_tensor: IsTensor) -> bool:
    """Whether an object holds exactly one sparse tensor in its attributes, or in those of objects
    in there, and can be taken apart."""
    if is_tensor(value) or attributes(value) is None:
        return False
    return len({id(tensor) for tensor in sparse_in(value, is_tensor)}) == 1


def sparse_in(value: Any, is_tensor: IsTensor, depth: int = _DEEPEST) -> Iterator[Any]:
    """The sparse tensors in attributes."""
    if is_tensor(value):
        yield value
        return
    own_attributes = attributes(value) if depth else None
    for attribute in () if own_attributes is None else own_attributes.values():
        yield from sparse_in(attribute, is_tensor, depth - 1)


def anew(like: Any, values: dict[str, Any]) -> Any:
    """An object of the class of another, with these attributes."""
    result = object.__new__(type(like))
    vars(result).update(values)
    return result


def _nothing(_: Any) -> Any:
    return MISSING


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


def share_memory(tensors: list[torch.Tensor]) -> bool:
    """Whether an element of one of these tensors lies where one of another does. What is beside one another in the
    same rows, as `split` leaves it, does not."""
    distinct = {id(tensor): tensor for tensor in tensors if tensor.numel()}.values()
    return any(_overlap(one, other) for one, other in itertools.combinations(distinct, 2))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (begin, end), (other_begin, other_end) = _span(one), _span(other)
    row = one.stride(0) if one.ndim else 0
    if row and other.ndim and other.stride(0) == row and begin // row == other_begin // row:
        first, other_first = _span(one[0]), _span(other[0])
        if max(first[1], other_first[1]) <= begin - begin % row + row:  # both end with the row
            (begin, end), (other_begin, other_end) = first, other_first
    return begin < other_end and other_begin < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The elements of its memory that a tensor begins and ends at."""
    begin = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + 1 + sum((size - 1) * step for size, step in steps)


class StructureCheck:
    """Given a name, a value that a call returned, and the one that a graph computed for it, raises Refusal where they
    are not alike, but for numbers in tensors: classes, numbers and text, what is one object, and what is the call's
    own."""

    def __init__(self, owned: Mapping[int, Any], is_tensor: IsTensor) -> None:
        """owned: inputs of the call, by identity."""
        self._owned, self._is_tensor = owned, is_tensor
        self._pairs: dict[int, Any] = {}
        self._back: dict[int, Any] = {}

    def __call__(self, name: str, value: Any, other: Any) -> None:
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
        pairs, back = self._pairs, self._back
        if pairs.setdefault(id(value), other) is not other or back.setdefault(id(other), value) is not value:
            raise Refusal(Why.GRAPH_OUTPUT_SHARED, name)
        entries, others = _entries(value, self._is_tensor), _entries(other, self._is_tensor)
        if list(entries) != list(others):
            raise Refusal(Why.GRAPH_OUTPUT_KEYS, name, sorted(map(str, entries)), sorted(map(str, others)))
        for key, entry in entries.items():
            self(f"{name}, {key}", entry, others[key])


def _entries(value: Any, is_tensor: IsTensor) -> Mapping[Any, Any]:
    own_attributes = attributes(value)
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_tensor(value):
        variables = getattr(value, "__dict__", {})
        return {key: variable for key, variable in variables.items() if isinstance(variable, PLAIN)}
    return {} if own_attributes is None else own_attributes
