"""The values that a program read, as guards: containers down to plain values, each once."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from ...refusals import Refusal, Why
from ..served_forward import function_of
from . import guards, origins
from .guards import LARGEST, Absent, Entry, Guards, Known, is_own
from .layers import guard_methods
from .objects import (
    has_foreign_forward,
    has_foreign_methods,
    is_open_book,
    is_plain,
    is_trusted_cache,
    iterates,
    operators_of,
)
from .origins import Origin

_SMALL = 64  # numbers in an array
_CODE = (types.FunctionType, type, types.ModuleType, property, staticmethod, classmethod, functools.partialmethod)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)
_SIZED = (list, tuple, dict, set, frozenset, collections.deque)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FIELDS = ("_tuplegetter", "member_descriptor", "getset_descriptor")  # of the objects of a class
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def same_label(label: str, place: int) -> str:
    """One label for all that an object has."""
    return label


class State:
    """Collects what was read. functions: of the program, by code.  classes: that have methods of it.

    attributes: names of attributes that its functions read; optional: those that need not be there.  any_attribute:
    they may read others.  unseen: nobody has watched what the functions call that are looked at now.
    """

    def __init__(self, model: nn.Module, attributes: set[str], optional: set[str], any_attribute: bool) -> None:
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.attributes, self.any_attribute, self.unseen = attributes, any_attribute, False
        self._optional = optional
        self.functions: dict[types.CodeType, dict[int, types.FunctionType]] = {}
        self.classes: dict[int, type] = {}
        self.seen: dict[int, str] = {}  # containers and objects, by identity
        self.count = 0
        self._keys: dict[tuple[int, bool], tuple[Any, dict[Any, tuple[Any, str]]]] = {}
        self._entries: list[Entry] = []
        self._layers: list[Entry] = []
        self._equal: list[Entry] = []
        self._absent: dict[int, Absent] = {}
        self._complete: dict[int, Absent] = {}
        self._keep: list[Any] = []

    def classes_and_hooks(self, model: nn.Module) -> None:
        """Guard that modules are of the classes that they are, and have the hooks that they have."""
        label = f"the class of a module of {type(model).__name__}"
        for get, box in (guards.classes_of, list(model.modules())[1:]), (guards.class_behind, weakref.ref(model)):
            self.entry(get, box, lambda _: label, layer=True)
        boxes = [module.__dict__[name] for module in model.modules() for name in _HOOKS]
        hooks = f"the hooks of {type(model).__name__} and its modules"
        self.entry(guards.values_in_all, boxes, lambda _: hooks, layer=True)

    def guards(self, grid_uses: frozenset[str]) -> Guards:
        """All of it; see `Guards`."""
        entries, layers = list(self._entries), list(self._layers)
        for (_, of_layer), (box, keys) in self._keys.items():
            names = tuple(keys)
            values, labels = tuple(v for v, _ in keys.values()), tuple(label for _, label in keys.values())
            entry = Entry(guards.itemgetter(names), box, guards.doubled(names, values), guards.doubled(names, labels))
            (layers if of_layer else entries).append(entry)
        absent = [*self._absent.values(), *self._complete.values()]
        return Guards(entries, layers, absent, self._equal, grid_uses)

    def key(self, box: Any, key: Any, label: str, layer: bool = False) -> Any:
        """Guard an entry of a dictionary, and return it. layer: of torch or a framework."""
        value = box[key]
        self._keys.setdefault((id(box), layer), (box, {}))[1][key] = value, label
        return value

    def absent(self, box: Any, names: Iterable[str], label: str, everything: bool = False) -> None:
        """Guard that a dictionary does not have these names. everything: nor any that it does not have now."""
        if everything:
            self._complete.setdefault(id(box), (box, Known(box), label))
        self._absent.setdefault(id(box), (box, set(), label))[1].update(name for name in names if name not in box)

    def entry(
        self, get: Callable[[Any], tuple[Any, ...]], box: Any, label: Callable[[int], str], layer: bool = False
    ) -> tuple[Any, ...]:
        """Guard what `get` returns of an object."""
        values = tuple(get(box))
        self.count += len(values)
        if values:
            names = tuple(label(place) for place in range(len(values)))
        else:
            names = (label(0),)
        (self._layers if layer else self._entries).append(Entry(get, box, values, names))
        return values

    def value(self, value: Any, label: str, where: str) -> None:
        """Guard what lies in a value, which itself is guarded where it was read. Raises Refusal."""
        if (is_plain(value) and not isinstance(value, enum.Enum)) or is_own(value) or is_trusted_cache(value):
            return
        if id(value) in self.seen:
            return
        if isinstance(value, (*_C_FUNCTIONS, types.GetSetDescriptorType, types.MemberDescriptorType)):
            self._c_function(value, label, where)
            return
        self.seen[id(value)] = label
        self._keep.append(value)
        if self.count + (len(value) if isinstance(value, _SIZED) else 0) > LARGEST:
            raise Refusal(Why.GRAPH_LARGE_STATE, label, where, LARGEST)
        if isinstance(value, _CODE):
            self._code(value, label, where)
        elif isinstance(value, nn.Module):
            self.module(value, label, where)
        elif isinstance(value, (tuple, list, collections.deque)):
            self._sequence(value, label, where)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._dictionary(value, label, where)
        elif type(value) in (set, frozenset):
            self._set(value, label, where)
        elif isinstance(value, np.ndarray) and value.size <= _SMALL and value.dtype != object:
            self._equal.append(Entry(guards.numbers_of, value, guards.numbers_of(value), (label,)))
        elif isinstance(value, functools.cached_property):
            self.value(value.func, label, where)
        elif isinstance(value, enum.Enum):
            self._own(value.__dict__, label, where, self.any_attribute)
            self.value(value._value_, f"{label}.value", where)
        elif isinstance(value, functools.partial):
            if isinstance(value.func, types.BuiltinFunctionType) and origins.effect_of(value.func) is not None:
                raise Refusal(Why.GRAPH_SIDE_EFFECT, label, where)
            for part in (value.func, value.args, value.keywords):
                self.value(part, label, where)
        elif isinstance(value, types.MethodType):
            self.value(value.__func__, label, where)
            self.value(value.__self__, label, where)
        else:
            self._object(value, label, where)

    def _c_function(self, value: Any, label: str, where: str) -> None:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            return
        trusted = origins.of_class(type(owner)) is Origin.TRUSTED
        if trusted and not isinstance(owner, (list, dict, set, collections.deque)):
            return
        self.value(owner, label, where)

    def _code(self, value: Any, label: str, where: str) -> None:
        if isinstance(value, types.FunctionType):
            self.functions.setdefault(value.__code__, {})[id(value)] = value
            if value.__dict__:  # as a registry of functions by the class of their argument
                foreign = origins.of_globals(value.__globals__) is not Origin.PROGRAM
                self._own(value.__dict__, label, where, foreign or self.any_attribute)
            wrapped = value.__dict__.get("__wrapped__")
            if isinstance(wrapped, types.FunctionType):
                self.functions.setdefault(wrapped.__code__, {})[id(wrapped)] = wrapped
        elif isinstance(value, (staticmethod, classmethod)):
            self.value(value.__func__, label, where)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                if isinstance(part, types.FunctionType):
                    self.value(part, label, where)
        elif isinstance(value, type):
            self.methods_of(value, where)
        elif isinstance(value, types.ModuleType):
            self._module(value, label, where)

    def _module(self, value: types.ModuleType, label: str, where: str) -> None:
        """A module of Python's under another name than its own, in an attribute or a list: what is read of it."""
        own, origin = vars(value), origins.of_module(value.__name__)
        if origin is Origin.PROGRAM:
            self._own(own, label, where, self.any_attribute)
        for name in sorted(self.attributes & own.keys()) if origin is Origin.LIBRARY else ():
            item = self.key(own, name, f"{label}.{name}")
            if not callable(item):  # that it is called would have been seen
                self.value(item, f"{label}.{name}", where)
            elif self.unseen:
                raise Refusal(Why.GRAPH_SIDE_EFFECT, f"{label}.{name}", where)

    def _sequence(self, value: Any, label: str, where: str) -> None:
        if type(value) is tuple or isinstance(value, tuple):
            items = value
        else:
            items = self.entry(tuple, value, lambda place: f"{label}[{place}]")
        for place, item in enumerate(items):
            self.value(item, f"{label}[{place}]", where)
        if type(value) not in (tuple, list, collections.deque):
            self._attributes(value, label, where, all_of_them=False)

    def _dictionary(self, value: Any, label: str, where: str) -> None:
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            raise Refusal(Why.GRAPH_READS_STATE, label, where, "defaultdict, which grows when it is read")
        keys = list(value)

        def name(place: int) -> str:
            return f"{label}[{keys[place % len(keys)]!r}]" if keys else label

        self.entry(tuple, value, name)
        items = self.entry(guards.values_in, value, name)
        for key, item in zip(keys, items, strict=True):
            self.value(key, label, where)
            self.value(item, f"{label}[{key!r}]", where)
        if type(value) not in (dict, collections.OrderedDict, collections.defaultdict):
            self._attributes(value, label, where, all_of_them=False)

    def _set(self, value: Any, label: str, where: str) -> None:
        for item in value:
            self.value(item, label, where)
        if type(value) is set:
            self.count += len(value)
            self._equal.append(Entry(guards.frozen, value, guards.frozen(value), (label,)))

    def _object(self, value: Any, label: str, where: str) -> None:
        cls = type(value)
        if not is_open_book(cls) or isinstance(value, (torch.Tensor, torch.Generator)) or iterates(value):
            raise Refusal(Why.GRAPH_READS_STATE, label, where, cls.__name__)
        self._attributes(value, label, where, all_of_them=True)

    def _attributes(self, value: Any, label: str, where: str, all_of_them: bool) -> None:
        """Of an object of the program."""
        self.methods_of(type(value), where)
        self.entry(guards.class_of, value, lambda _: f"the class of {label}")
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._own(own, label, where, all_of_them and (self.any_attribute or has_foreign_methods(type(value))))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                private = name.startswith("__") and not name.endswith("__")
                name = f"_{base.__name__.lstrip('_')}{name}" if private else name
                if (name in self.attributes or self.any_attribute) and hasattr(value, name):
                    item = self.entry(guards.slot(name), value, functools.partial(same_label, f"{label}.{name}"))[0]
                    self.value(item, f"{label}.{name}", where)

    def _own(self, own: dict[str, Any], label: str, where: str, everything: bool) -> None:
        """The attributes in a `__dict__`: those that are read."""
        for name, item in list(own.items()):
            if name in self.attributes or everything:
                self.key(own, name, f"{label}.{name}")
                self.count += 1
                self._part(item, name, f"{label}.{name}", where)
        self.absent(own, self.attributes, label, everything)

    def _part(self, item: Any, name: str, label: str, where: str) -> None:
        if name in self.attributes:
            self.value(item, label, where)
            return
        try:  # it may be read, under a name that is not written in the program
            self.value(item, label, where)
        except Refusal:
            return

    def module(self, module: nn.Module, label: str, where: str) -> None:
        """A module of the program that is none of the model's: its attributes, and no tensors."""
        if id(module) in self.modules:
            return
        if next(iter(module.parameters()), None) is not None or next(iter(module.buffers()), None) is not None:
            raise Refusal(Why.GRAPH_READS_STATE, label, where, f"{type(module).__name__} outside of the model")
        for name, part in module.named_modules():
            self.own_module(part, f"{label}.{name}" if name else label, False, {}, where)

    def own_module(self, module: nn.Module, label: str, trusted: bool, before: dict[str, Any], where: str) -> None:
        """A module of the model. trusted: of torch or the framework, which may keep values in itself; `before`
        are its attributes before the call."""
        own = module.__dict__
        if isinstance(module, torch.jit.ScriptModule):
            raise Refusal(Why.GRAPH_READS_STATE, label, where, "ScriptModule")
        self.seen[id(module)] = label
        self.methods_of(type(module), where)
        if own["_modules"] or not trusted or hasattr(type(module), "__len__"):  # a list that is empty for now
            self.entry(guards.items_in, own["_modules"], lambda _: f"the modules of {label}", layer=True)
        for tensors in (own["_parameters"], own["_buffers"]):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.__dict__:
                    self._own(tensor.__dict__, f"{label}.{name}", where, self.any_attribute)
                elif tensor is not None and (self._optional or self.any_attribute):
                    self.absent(tensor.__dict__, self._optional, f"{label}.{name}", self.any_attribute)
        everything = trusted or self.any_attribute or has_foreign_forward(type(module))
        for name, item in list(own.items()):
            if name in _OF_MODULES or (trusted and name.startswith("_") and name not in self.attributes):
                continue
            if trusted:
                if before.get(name, self) is item and self._simple(item):
                    self.key(own, name, f"{label}.{name}", layer=True)
                    if isinstance(item, list):
                        self.entry(tuple, item, functools.partial(same_label, f"{label}.{name}"), layer=True)
            elif name in self.attributes or everything or name == "training":
                self.key(own, name, f"{label}.{name}")
                self._part(item, name, f"{label}.{name}", where)
        names = {"forward", "__call__", *self._optional} if trusted else {*self.attributes, "forward"}
        self.absent(own, names, label, everything and not trusted)

    def _simple(self, item: Any) -> bool:
        if isinstance(item, list):
            return len(item) <= _SMALL and all(map(is_plain, item))
        if isinstance(item, tuple):
            return len(item) <= _SMALL and all(map(self._simple, item))
        return is_plain(item) or isinstance(item, types.FunctionType) or hasattr(type(item), "__members__")

    def methods_of(self, cls: type, where: str) -> None:
        """What a class has: functions by identity, and values that are read."""
        if id(cls) in self.classes or cls is object:
            return
        if origins.of_class(type(cls)) is Origin.PROGRAM:
            self.methods_of(type(cls), where)
        operators = operators_of(cls)
        for base in cls.__mro__:
            if origins.of_class(base) is Origin.PROGRAM:
                self.absent(vars(base), operators, base.__name__)
            if id(base) in self.classes or base is object:
                continue
            self.classes[id(base)] = base
            own = vars(base)
            if origins.of_class(base) is not Origin.PROGRAM:
                if issubclass(base, nn.Module):
                    guard_methods(base, self.key)
                    self.absent(own, () if base is nn.Module else ("forward", "__call__"), base.__name__)
                continue
            for name, member in list(own.items()):
                item = function_of(member)
                if isinstance(item, (types.FunctionType, property, staticmethod, classmethod, functools.partialmethod)):
                    self.key(own, name, f"{base.__name__}.{name}")
                    self.value(item, f"{base.__name__}.{name}", where)
                elif (name in self.attributes or self.any_attribute) and not name.startswith("__"):
                    self.key(own, name, f"{base.__name__}.{name}")
                    if type(item).__name__ not in _FIELDS:
                        self._part(item, name, f"{base.__name__}.{name}", where)
            self.absent(own, self.attributes, base.__name__, self.any_attribute)
