"""Proxies of the inputs of a call: in a trial they record what the model reads of them and writes to them.

Objects around the sparse tensor become others of the same class. Their numbers and text are part of
what a graph is captured for. Lists and other tensors may only be passed on, as they stand for those of
the calls to come: a model that looks into them is refused.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from ....refusals import Refusal, Why
from .structures import PLAIN, anew, attributes, is_plain, role_of, sparse_in, wraps

RESUMED = ("resume point",)  # in front of the paths of what a resume point is called with
AMBIGUOUS = object()  # instead of a path


class Call(NamedTuple):
    """x: the sparse tensor.  rerun: calls a function as the model was, with another sparse tensor in
    the place of x and proxies of dictionaries and objects, see `InputProxies`.  constants:
    what else counts, by value.  dicts: the dictionaries among the inputs, by path; parts: objects
    around x, what lies in them, and other tensors.  tensors_of: the framework of x.  buffers: the model's
    before the call, by name, where its results are to be compared.  repeatable: whether `rerun` does nothing that
    outlasts the call, as far as is known; raises Refusal where it does."""

    x: Any
    rerun: Callable[[Callable[..., Any], InputProxies], Any]
    constants: Hashable
    dicts: Mapping[Any, dict[Any, Any]]
    parts: Mapping[Any, Any]
    tensors_of: Callable[[Any], Any]
    buffers: Mapping[str, torch.Tensor] = types.MappingProxyType({})
    repeatable: Callable[[], bool] = lambda: True

    def may_run_again(self) -> bool:
        """`repeatable`, where it does not matter why not."""
        try:
            return self.repeatable()
        except Refusal:
            return False

    def input_at(self, path: Any) -> Any:
        """The input with this path; () for x. Raises Refusal."""
        if path == ():
            return self.x
        value = self.dicts.get(path, self.parts.get(path))
        if value is None:
            raise Refusal(Why.GRAPH_RETURNS_UNKNOWN, path[-1])
        return value

    def inputs_by_id(self, tensors: Any) -> dict[int, Any]:
        """All inputs, by identity."""
        inputs = [self.x, tensors.features_of(self.x), tensors.coordinates_of(self.x)]
        return {id(value): value for value in (*inputs, *self.dicts.values(), *self.parts.values())}


class InputProxies:
    """The inputs of a call in a trial: another sparse tensor, and copies of the dictionaries and of the
    objects around sparse tensors. They record what is read and written from `begin` on.

    proxies: by identity, all that stands for an input of the call, and its path there.
    """

    def __init__(self, reads: set[Any], start: Callable[[], Any], tensors_of: Callable[[Any], Any]) -> None:
        """reads: (path, key) of what was read, which grows.  start: makes the sparse tensor, when
        the part of the call begins that counts.  tensors_of: the framework of one."""
        self.reads, self._start, self._tensors_of = reads, start, tensors_of
        self.x: Any = None
        self.initial: Mapping[Any, dict[Any, Any]] = {}  # as they were when the call came
        self.tracked: dict[Any, TrackedDict] = {}
        self.tracking = False
        self.proxies: dict[int, tuple[Any, Any]] = {}
        self._objects: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._refusal: Refusal | None = None

    def is_tensor(self, value: Any) -> bool:
        """Whether `value` is a sparse tensor of the framework."""
        tensors = self._tensors_of(value)
        return tensors is not None and tensors.is_tensor(value)

    def refuse(self, why: Why, *details: Any) -> NoReturn:
        """Raise Refusal, now and at the end: models may catch it here."""
        self._refusal = self._refusal or Refusal(why, *details)
        raise self._refusal

    def track(self, path: Any, own: dict[Any, Any]) -> TrackedDict:
        """A copy of the dictionary `own`, an input with this path, that records what is read of it."""
        copy = self.tracked[path] = TrackedDict(own)
        copy.path, copy.inputs, copy.old = path, self, dict(own) if self.tracking else {}
        self.register(copy, path)
        return copy

    def register(self, proxy: Any, path: Any) -> None:
        """A value stands for the input with this path."""
        registered = self.proxies.get(id(proxy))
        self.proxies[id(proxy)] = proxy, path if registered is None else AMBIGUOUS

    def begin(self) -> Any:
        """The sparse tensor."""
        self.x = self._start()
        for copy in self.tracked.values():
            copy.old = dict(dict.items(copy))
        self.tracking = True
        return self.x

    def resumed_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Begin where a resume point is called; the arguments that it is called with."""
        self.begin()
        named = {key: self.substitute(argument, (*RESUMED, key)) for key, argument in kwargs.items()}
        return [self.substitute(argument, (*RESUMED, n)) for n, argument in enumerate(args)], named

    def substitute(self, value: Any, path: Any) -> Any:
        """The proxy of a sparse tensor or of an object around one; other values as they are."""
        if self.is_tensor(value):
            return self.x
        return self.proxy_of(value, path) if wraps(value, self.is_tensor) else value

    def proxy_of(self, own: Any, path: Any) -> Any:
        """An object like `own`, around the sparse tensor of this trial."""
        values = self.initial.get(path, attributes(own))
        assert values is not None
        (x,) = {id(tensor): tensor for tensor in sparse_in(own, self.is_tensor)}.values()
        proxy = anew(own, {name: self._part(attribute, (*path, name), x) for name, attribute in values.items()})
        self._objects.append((proxy, dict(vars(proxy)), dict(vars(type(proxy)))))
        self.register(proxy, path)
        return proxy

    def list_of(self, items: list[Any]) -> list[Any]:
        """A list that stands for one of the call, to which the model may not write."""
        self._lists.append((items, list(items)))
        return items

    def is_proxy(self, value: Any) -> bool:
        """Whether a value is such an object."""
        return any(value is proxy for proxy, _, _ in self._objects)

    def _part(self, value: Any, path: Any, x: Any) -> Any:
        """The proxy of an attribute of an object around `x`."""
        if is_plain(value):
            return value
        if isinstance(value, torch.Tensor):
            tensors, role = self._tensors_of(x), role_of(value, x, self._tensors_of(x))
            if role == "features":
                return tensors.features_of(self.x)
            if role == "coordinates":
                return tensors.coordinates_of(self.x)
            proxy: Any = _tensor_proxy(self, path)
        elif type(value) in (list, tuple):
            proxy = _ListProxy() if type(value) is list else _TupleProxy()
            proxy.inputs, proxy.path, proxy.truth = self, path, bool(value)
        elif type(value) is dict:
            return with_proxies(value, self, path, self.x, self.is_tensor, opaque=True)
        else:
            return self.substitute(value, path)
        self.register(proxy, path)
        return proxy

    def written(self) -> dict[Any, dict[Any, Any]]:
        """New values by path and key. Raises Refusal where entries are gone, attributes or lists were
        written, or something was refused before."""
        if self._refusal is not None:
            raise self._refusal
        for own, items in self._lists:
            if len(own) != len(items) or not all(map(operator.is_, own, items)):
                raise Refusal(Why.GRAPH_WRITES_OBJECT, "list")
        for proxy, values, shared in self._objects:
            if not _same_entries(vars(proxy), values) or not _same_entries(vars(type(proxy)), shared):
                raise Refusal(Why.GRAPH_WRITES_OBJECT, type(proxy).__name__)
        written = {}
        for path, copy in self.tracked.items():
            if not copy.old.keys() <= set(dict.keys(copy)):
                raise Refusal(Why.GRAPH_TAKES_ENTRIES)
            new = {key: value for key, value in dict.items(copy) if key not in copy.old or copy.old[key] is not value}
            if new:
                written[path] = new
        return written

    def end(self) -> None:
        """Let go of the inputs of the call."""
        self.initial, self._start = {}, lambda: None
        self._objects.clear()
        self._lists.clear()
        for copy in self.tracked.values():
            dict.clear(copy)
            copy.old = {}


def _same_entries(entries: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return entries.keys() == other.keys() and all(entries[key] is other[key] for key in other)


def with_proxies(
    value: Any, inputs: InputProxies, path: Any = (), x: Any = None, is_x: Any = None, opaque: bool = False
) -> Any:
    """A structure with tracked copies of its dictionaries, `x` for what `is_x`, and objects around
    it instead of those around that.

    opaque: tensors have no values, either."""
    if is_x is not None and is_x(value):
        return x
    if isinstance(value, torch.Tensor):
        proxy = _tensor_proxy(inputs, path) if opaque else value
        inputs.register(proxy, path)
        return proxy

    def inside(key: Any, item: Any) -> Any:
        return with_proxies(item, inputs, (*path, key), x, is_x, opaque)

    if type(value) in (list, tuple):
        items = [inside(n, item) for n, item in enumerate(value)]
        return tuple(items) if type(value) is tuple else inputs.list_of(items)
    if type(value) is dict:
        own = inputs.initial.get(path, value)
        return inputs.track(path, {key: inside(key, item) for key, item in own.items()})
    if is_x is not None and not opaque and wraps(value, is_x):
        return inputs.proxy_of(value, path)
    return value


class TrackedDict(dict):  # type: ignore[type-arg]
    """A copy of a dictionary that records reads of its initial entries, which are read key by key."""

    path: Any
    inputs: InputProxies
    old: dict[Any, Any]

    def _record_read(self, key: Any) -> None:
        if not self.inputs.tracking:
            return
        if dict.__contains__(self, key):
            value = dict.__getitem__(self, key)
            if key not in self.old or self.old[key] is not value:
                return  # written by the model
            if value is self.inputs.x or self.inputs.is_proxy(value):
                return
            if not isinstance(value, (*PLAIN, torch.Tensor, dict)):
                self.inputs.refuse(Why.GRAPH_READS_OBJECT, key, type(value).__name__)
        self.inputs.reads.add((self.path, key))

    def __getitem__(self, key: Any) -> Any:
        self._record_read(key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary; the read is recorded."""
        self._record_read(key)
        return dict.get(self, key, default)

    def __contains__(self, key: Any) -> bool:
        self._record_read(key)
        return dict.__contains__(self, key)


def _refuse_full_read(name: str) -> Any:
    own = getattr(dict, name)

    def method(self: TrackedDict, *args: Any, **kwargs: Any) -> Any:
        if self.inputs.tracking:
            self.inputs.refuse(Why.GRAPH_READS_ALL)
        return own(self, *args, **kwargs)

    return method


for _name in ("__iter__", "__len__", "__eq__", "__or__", "__ror__", "keys", "values", "items", "copy"):
    setattr(TrackedDict, _name, _refuse_full_read(_name))
for _name in ("pop", "popitem", "clear", "setdefault"):
    setattr(TrackedDict, _name, _refuse_full_read(_name))


def _refuse_read(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.inputs.refuse(Why.GRAPH_READS_LIST, self.path[-1])


def _sequence_proxy(base: type, names: str) -> Any:
    """A class whose objects stand for a list or a tuple, and hold nothing; of these methods none may be called."""
    names += " __add__ __contains__ __eq__ __ge__ __getitem__ __gt__ __iter__ __le__ __len__ __lt__ __mul__ __ne__"
    names += " __reduce_ex__ __repr__ __rmul__ count index"
    methods: dict[str, Any] = dict.fromkeys(names.split(), _refuse_read)
    return type(f"_{base.__name__.title()}Proxy", (base,), {**methods, "__bool__": lambda self: self.truth})


_ListProxy = _sequence_proxy(
    list,
    "__delitem__ __iadd__ __imul__ __reversed__ __setitem__ append clear copy extend insert pop remove reverse sort",
)
_TupleProxy = _sequence_proxy(tuple, "__hash__")


def _tensor_proxy(inputs: InputProxies, path: Any) -> torch.Tensor:
    """Stands for a tensor, and has no values."""

    class TensorProxy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            inputs.refuse(Why.GRAPH_READS_TENSOR, path[-1])

    proxy: torch.Tensor = torch.Tensor._make_subclass(TensorProxy, torch.empty(0))
    return proxy
